# SPDX-License-Identifier: Apache-2.0
"""Packing in numpy: what it means, and what runs without the native library."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxsparse.ops.packing.batch import (
    NOTHING,
    DeviceIds,
    Distinct,
    Grouped,
    Int32s,
    Int64s,
    RowArrays,
    SlabFeature,
)


def distinct(codes: Int64s, num_owners: int, rows_per_shard: int) -> Distinct:
    """Groups equal codes, leaving out NOTHING.

    >>> found = distinct(np.array([7, -1, 2, 7]), num_owners=2, rows_per_shard=5)
    >>> found.codes, found.counts, found.order, found.bounds
    (array([2, 7]), array([1, 2]), array([2, 0, 3]), array([0, 1, 2]))
    """
    index_bits = codes.size.bit_length()
    if (num_owners * rows_per_shard).bit_length() + index_bits < 64:
        # One sort of (code, index) in a single word is several times faster than an argsort.
        packed = (codes << index_bits) | np.arange(codes.size)
        packed.sort()
        packed = packed[np.searchsorted(packed, 0) :]
        order, ordered = packed & ((1 << index_bits) - 1), packed >> index_bits
    else:
        order = np.argsort(codes, kind="stable")
        order = order[np.searchsorted(codes[order], 0) :]
        ordered = codes[order]
    heads = np.flatnonzero(np.diff(ordered, prepend=NOTHING))
    found = ordered[heads]
    bounds = np.searchsorted(found, np.arange(num_owners + 1) * rows_per_shard)
    return Distinct(order, found, np.append(heads, ordered.size), bounds)


def group(ids: DeviceIds) -> Grouped:
    """See `jaxsparse.ops.packing.group`."""
    room = ids.num_places
    shape = ids.num_devices, room
    result = Grouped(
        order=np.zeros(shape, np.int32),
        codes=np.zeros(shape, np.int64),
        starts=np.zeros((ids.num_devices, room + 1), np.int32),
        inverse=np.full(shape, -1, np.int32),
        bounds=np.zeros((ids.num_devices, ids.num_owners + 1), np.int64),
    )
    for device in range(ids.num_devices):
        codes = np.full(room, NOTHING, np.int64)
        for number, feature in enumerate(ids.features):
            part = feature.codes[slice(*ids.cuts[number, device : device + 2])]
            place = ids.places[device, number]
            codes[place : place + part.size] = part
        found = distinct(codes, ids.num_owners, ids.rows_per_shard)
        result.order[device, : found.order.size] = found.order
        result.codes[device, : found.codes.size] = found.codes
        result.starts[device, : found.starts.size] = found.starts
        result.inverse[device, found.order] = np.repeat(np.arange(found.codes.size), found.counts)
        result.bounds[device] = found.bounds
    return result


def fill_bags(ids: DeviceIds, num_ids: int) -> tuple[Int32s, Int32s]:
    """See `jaxsparse.ops.packing.fill_bags`."""
    bag_of = np.full((ids.num_devices, num_ids), ids.num_bags, np.int32)
    offsets = np.zeros((ids.num_devices, ids.num_bags + 1), np.int32)
    for device in range(ids.num_devices):
        base = 0
        for number, feature in enumerate(ids.features):
            place = slice(*ids.places[device, number : number + 2])
            bag_of[device, place] = base + _bags(feature, ids, number, device)
            base += ids.samples * feature.width
        counts = np.bincount(bag_of[device], minlength=ids.num_bags + 1)
        np.cumsum(counts[:-1], out=offsets[device, 1:])
    return bag_of, offsets


def _bags(feature: SlabFeature, ids: DeviceIds, number: int, device: int) -> Int64s:
    """Bag of each of a feature's ids on a device, counted from its first."""
    if feature.num_ids is not None:
        sample = np.repeat(np.arange(ids.samples), feature.num_ids)
        position = np.tile(np.arange(feature.num_ids), ids.samples)
    else:
        assert feature.splits is not None
        splits = feature.splits[device * ids.samples :][: ids.samples + 1]
        counts = np.diff(splits)
        sample = np.repeat(np.arange(counts.size), counts)
        if feature.position is None:
            position = np.arange(sample.size) - (splits - splits[:1])[sample]
        else:
            position = feature.position[slice(*ids.cuts[number, device : device + 2])]
    return sample * feature.width + (position if feature.is_unpooled else 0)


def fill_rows(
    ids: DeviceIds,
    grouped: Grouped,
    num_ids: int,
    capacity: int,
    bag_of: Int32s | None,
    with_ids: bool,
) -> RowArrays:
    """See `jaxsparse.ops.packing.fill_rows`."""
    devices, num_rows = ids.num_devices, ids.num_owners * capacity
    result = RowArrays(
        rows=np.full((devices, num_rows), ids.rows_per_shard, np.int32),
        inverse=np.full((devices, num_ids), num_rows, np.int32),
        row_offsets=np.zeros((devices, num_rows + 1), np.int32),
        row_bags=np.full((devices, num_ids), ids.num_bags, np.int32),
        row_ids=np.full((devices, num_ids), num_ids, np.int32) if with_ids else None,
    )
    for device in range(devices):
        found = grouped.of(device)
        owner = np.repeat(np.arange(ids.num_owners), np.diff(found.bounds))
        slots = owner * capacity + np.arange(owner.size) - found.bounds[owner]
        result.rows[device, slots] = found.codes - owner * ids.rows_per_shard
        result.inverse[device, found.order] = np.repeat(slots, found.counts)
        counts = np.zeros(num_rows, np.int64)
        counts[slots] = found.counts
        np.cumsum(counts, out=result.row_offsets[device, 1:])
        bags = found.order if bag_of is None else bag_of[device, found.order]
        result.row_bags[device, : bags.size] = bags
        if result.row_ids is not None:
            result.row_ids[device, : bags.size] = found.order
    return result


def fill_lengths(lengths: Sequence[Int64s | int], num_samples: int, padded_samples: int) -> Int32s:
    """See `jaxsparse.ops.packing.fill_lengths`."""
    result = np.zeros((padded_samples, len(lengths)), np.int32)
    for column, part in enumerate(lengths):
        result[:num_samples, column] = part
    return result
