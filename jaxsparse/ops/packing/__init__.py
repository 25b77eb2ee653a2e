# SPDX-License-Identifier: Apache-2.0
"""The host's part of a batch: keys to codes, equal codes grouped, the arrays that are shipped.

`reference` is the meaning, in numpy, and what runs where there is no native library; `native` and
`keys` give the same bits on all threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxsparse.ops.native import library
from jaxsparse.ops.packing import native, reference
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
from jaxsparse.ops.packing.reference import distinct

__all__ = [
    "NOTHING",
    "DeviceIds",
    "Distinct",
    "Grouped",
    "RowArrays",
    "SlabFeature",
    "distinct",
    "fill_bags",
    "fill_lengths",
    "fill_rows",
    "group",
]


def group(ids: DeviceIds) -> Grouped:
    """Groups the equal codes of each device."""
    found = native.group(ids) if library.is_available() else None
    return reference.group(ids) if found is None else found


def fill_bags(ids: DeviceIds, num_ids: int) -> tuple[Int32s, Int32s]:
    """Bag of each id, and the first id of each bag.

    Args:
        ids: the batch.
        num_ids: M, length of a device's buffer.

    Returns:
        ``[num_devices, M]`` int32, O behind the last id; ``[num_devices, O + 1]`` int32.
    """
    if library.is_available():
        return native.fill_bags(ids, num_ids)
    return reference.fill_bags(ids, num_ids)


def fill_rows(
    ids: DeviceIds,
    grouped: Grouped,
    num_ids: int,
    capacity: int,
    bag_of: Int32s | None,
    with_ids: bool,
) -> RowArrays:
    """Rows asked of each owner, the row of each id, and the ids by row.

    Args:
        ids: the batch.
        grouped: from `group`.
        num_ids: M, length of a device's buffer.
        capacity: C, rows per owner.
        bag_of: from `fill_bags`; None where the id at place i is bag i.
        with_ids: whether ``row_ids`` are wanted.
    """
    if library.is_available():
        return native.fill_rows(ids, grouped, num_ids, capacity, bag_of, with_ids)
    return reference.fill_rows(ids, grouped, num_ids, capacity, bag_of, with_ids)


def fill_lengths(lengths: Sequence[Int64s | int], num_samples: int, padded_samples: int) -> Int32s:
    """Bag lengths of all features, by sample.

    Args:
        lengths: by feature ``[num_samples]``, or one length for all bags.
        num_samples: B.
        padded_samples: B'.

    Returns:
        ``[B', F]`` int32, 0 behind the samples.
    """
    if library.is_available():
        return native.fill_lengths(lengths, num_samples, padded_samples)
    return reference.fill_lengths(lengths, num_samples, padded_samples)
