# SPDX-License-Identifier: Apache-2.0
"""Packing in C++ (`distinct.cc`, `fill.cc`): the same bits as `reference`, on all threads.

ctypes lets other Python threads run meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.ops.native import library
from jaxsparse.ops.packing.batch import DeviceIds, Grouped, Int32s, Int64s, RowArrays

ALIGNMENT = 64
"""Bytes; JAX on CPUs reads numpy memory so aligned where it is, instead of copying it."""

MAX_IDS = 2**31 - 1
"""Most ids of a device: places are int32."""


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """``np.empty`` whose first byte is a multiple of `ALIGNMENT`."""
    kind = np.dtype(dtype)
    num_bytes = int(np.prod(shape)) * kind.itemsize
    buffer = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -address(buffer) % ALIGNMENT
    return buffer[start : start + num_bytes].view(kind).reshape(shape)


def address(array: npt.NDArray[Any] | None) -> int:
    """Of an array's first entry; 0 for None."""
    return 0 if array is None else int(array.__array_interface__["data"][0])


def call(name: str, *arguments: Any) -> int:
    """Calls a function of the library with int64 numbers, and arrays by address."""
    values = [
        ctypes.c_int64(address(a) if a is None or isinstance(a, np.ndarray) else a)
        for a in arguments
    ]
    return int(getattr(library.load(), name)(*values))


def group(ids: DeviceIds) -> Grouped | None:
    """See `jaxsparse.ops.packing.group`; None where a table's codes and indices fit no word."""
    tables = np.array([feature.table for feature in ids.features], np.int64)
    order = np.argsort(tables, kind="stable")
    first = np.flatnonzero(np.diff(tables[order], prepend=-1))
    codes = np.array([address(feature.codes) for feature in ids.features], np.int64)
    pieces = np.empty((ids.num_devices, len(ids.features), 3), np.int64)
    pieces[:, :, 0] = (codes[:, None] + 8 * ids.cuts[:, :-1])[order].T
    pieces[:, :, 1] = np.diff(ids.cuts)[order].T
    pieces[:, :, 2] = ids.places[:, :-1][:, order]
    room = int(pieces[:, :, 1].sum(axis=1).max(initial=0))
    if ids.num_places > MAX_IDS:
        return None
    shape = ids.num_devices, room
    result = Grouped(
        order=np.empty(shape, np.int32),
        codes=np.empty(shape, np.int64),
        starts=np.empty((ids.num_devices, room + 1), np.int32),
        inverse=np.empty((ids.num_devices, ids.num_places), np.int32),
        bounds=np.empty((ids.num_devices, ids.num_owners + 1), np.int64),
    )
    failed = call(
        "jaxsparse_distinct",
        pieces,
        np.append(first, tables.size),
        ids.num_devices,
        first.size,
        ids.num_owners,
        ids.rows_per_shard,
        room,
        ids.num_places,
        result.order,
        result.codes,
        result.starts,
        result.inverse,
        result.bounds,
    )
    return None if failed else result


def fill_bags(ids: DeviceIds, num_ids: int) -> tuple[Int32s, Int32s]:
    """See `jaxsparse.ops.packing.fill_bags`."""
    features = np.empty((len(ids.features), 6), np.int64)
    base = 0
    for number, feature in enumerate(ids.features):
        features[number] = (
            base,
            feature.width,
            feature.num_ids or 0,
            feature.is_unpooled,
            address(feature.splits),
            address(feature.position),
        )
        base += ids.samples * feature.width
    bag_of = np.empty((ids.num_devices, num_ids), np.int32)
    offsets = aligned_empty((ids.num_devices, ids.num_bags + 1), np.int32)
    call(
        "jaxsparse_fill_bags",
        features,
        ids.places,
        ids.num_devices,
        len(ids.features),
        ids.samples,
        ids.num_samples,
        num_ids,
        ids.num_bags,
        bag_of,
        offsets,
    )
    return bag_of, offsets


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
        rows=aligned_empty((devices, num_rows), np.int32),
        inverse=aligned_empty((devices, num_ids), np.int32),
        row_offsets=aligned_empty((devices, num_rows + 1), np.int32),
        row_bags=aligned_empty((devices, num_ids), np.int32),
        row_ids=aligned_empty((devices, num_ids), np.int32) if with_ids else None,
    )
    call(
        "jaxsparse_fill_rows",
        devices,
        ids.num_owners,
        capacity,
        ids.rows_per_shard,
        grouped.order.shape[1],
        grouped.inverse.shape[1],
        num_ids,
        ids.num_bags,
        grouped.order,
        grouped.codes,
        grouped.starts,
        grouped.inverse,
        grouped.bounds,
        bag_of,
        result.rows,
        result.inverse,
        result.row_offsets,
        result.row_bags,
        result.row_ids,
    )
    return result


def fill_lengths(lengths: Sequence[Int64s | int], num_samples: int, padded_samples: int) -> Int32s:
    """See `jaxsparse.ops.packing.fill_lengths`."""
    result = aligned_empty((padded_samples, len(lengths)), np.int32)
    call(
        "jaxsparse_fill_lengths",
        np.array([0 if isinstance(part, int) else address(part) for part in lengths], np.int64),
        np.array([part if isinstance(part, int) else 0 for part in lengths], np.int64),
        len(lengths),
        num_samples,
        padded_samples,
        result,
    )
    return result
