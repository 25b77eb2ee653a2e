# SPDX-License-Identifier: Apache-2.0
"""Bytes that a full table of a row store takes, by tier, before anything is allocated."""

from __future__ import annotations

import dataclasses

from jaxsparse.dynamic import TTL, BloomAdmission, Dynamic
from jaxsparse.planner import slot_bytes, weight_bytes
from jaxsparse.resident import device_rows, most_rows
from jaxsparse.specs import TableSpec
from jaxsparse.store.growing import GROWTH, MIN_LENGTH
from jaxsparse.store.ssd.layout import SEGMENT_BYTES, SegmentShape, rows_per_segment
from jaxsparse.store.ssd.write_behind import IN_FLIGHT
from jaxsparse.store.swap import block_size

INDEX_BYTES = 15.93
"""Of the native key index per key with its key by row, measured at the worst of all sizes from 1 M
to 50 M keys (benchmarks/results/index.json)."""

SCRATCH_BYTES = 8
"""Per row: marks of the rows of a batch and of a pass."""

DISK_INDEX_BYTES = 5
"""Of host memory per row on a disk: its checksum, and whether it is released."""


WAITING_BYTES = 20
"""Per key that `CountAdmission` has counted and that has no row yet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostPlan:
    """One table of a row store when it is full; bytes are those of a job of one process. Of several
    each has index and counters whole, and its share of the rows."""

    row_bytes: int
    """Of a row with its slots."""
    device_rows: int
    ram_rows: int
    disk_rows: int
    index_bytes: int
    """Keys to row numbers and back; the most it takes at any size."""
    counter_bytes: int
    """What is known of every row and every place: counts, hotness, where it is; a filter."""
    ram_bytes: int
    """Rows in memory."""
    disk_memory_bytes: int
    """Memory for rows on disks: checksums, and segments that are being filled and written."""
    disk_bytes: int
    """Files of the rows on disks; twice as much where half of them is garbage."""

    @property
    def host_bytes(self) -> int:
        """All of the host's memory."""
        parts = self.index_bytes, self.counter_bytes, self.ram_bytes, self.disk_memory_bytes
        return sum(parts)


def plan_host(table: TableSpec) -> HostPlan:
    """What a stored table takes beyond the devices.

    Keys that `CountAdmission` counts and that have no row yet are not in it (`WAITING_BYTES`).

    >>> user = TableSpec("user", embedding_dim=16, keys=Dynamic(1000))
    >>> plan_host(user).ram_rows
    0
    """
    total, on_device = most_rows(table), device_rows(table)
    tiers = table.tiers
    beyond = total - on_device
    in_ram = beyond if tiers is None or tiers.host_rows is None else min(tiers.host_rows, beyond)
    on_disk = beyond - in_ram
    row_bytes = weight_bytes(table, 1) + slot_bytes(table, 1)
    has_disks = tiers is not None and bool(tiers.ssd)
    return HostPlan(
        row_bytes=row_bytes,
        device_rows=on_device,
        ram_rows=in_ram,
        disk_rows=on_disk,
        index_bytes=round(total * INDEX_BYTES),
        counter_bytes=_counter_bytes(table, total, on_device, in_ram, has_disks),
        ram_bytes=in_ram * row_bytes,
        disk_memory_bytes=_disk_memory_bytes(on_disk, row_bytes),
        disk_bytes=_disk_bytes(on_disk, row_bytes),
    )


BLOCKS_AT_A_TIME = 4
"""Of rows on their way at a boundary: those that left a device, as they come from it and as they
are put away; those that come, for this pass and, from disks, read early for the next."""


def moving_bytes(table: TableSpec, rows: int) -> int:
    """Host memory for rows on their way, where ``rows`` at most come or leave at a boundary.

    On one device: of several the rows of each are padded. `Pass.facts` tells how many cross:
    ``host_to_device_bytes`` and ``device_to_host_bytes``.

    >>> user = TableSpec("user", embedding_dim=16, keys=Dynamic(1000))
    >>> moving_bytes(user, 300) // plan_host(user).row_bytes
    2048
    """
    row_bytes = weight_bytes(table, 1) + slot_bytes(table, 1)
    return BLOCKS_AT_A_TIME * block_size(rows) * row_bytes


def grown_length(length: int) -> int:
    """Entries of an array that has grown, a few at a time, to hold ``length``.

    >>> grown_length(1), grown_length(1500)
    (1024, 1730)
    """
    size = MIN_LENGTH
    while size < length:
        size = int(size * GROWTH)
    return size


def _counter_bytes(
    table: TableSpec, total: int, on_device: int, in_ram: int, has_disks: bool
) -> int:
    keys = table.keys
    eviction = keys.eviction if isinstance(keys, Dynamic) else None
    admission = keys.admission if isinstance(keys, Dynamic) else None
    # Occurrences, last batch, hotness, place on the devices, whether it has values.
    per_row = 4 + 4 + 4 + 4 + 1
    per_row += 8 if isinstance(eviction, TTL) and eviction.seconds is not None else 0
    per_row += 4 if on_device < total else 0  # slot in memory
    per_row += 8 if has_disks else 0  # location on a disk
    per_place = 4 + 4 + 8  # its row, free places, where it lies
    fixed = admission.bytes if isinstance(admission, BloomAdmission) else 0
    scratch = SCRATCH_BYTES * total
    # Whose, free ones; what each is worth, where others wait on a disk.
    slots = (12 if has_disks else 8) * grown_length(in_ram) if in_ram else 0
    return per_row * grown_length(total) + per_place * on_device + slots + fixed + scratch


def _disk_memory_bytes(rows: int, row_bytes: int) -> int:
    if not rows:
        return 0
    # One being filled, others on their way; no more than there are.
    pending = min((IN_FLIGHT + 1) * SEGMENT_BYTES, rows * (row_bytes + 8))
    return DISK_INDEX_BYTES * rows + pending


def _disk_bytes(rows: int, row_bytes: int) -> int:
    full = rows_per_segment(SEGMENT_BYTES, row_bytes)
    whole, rest = divmod(rows, full)
    shape = SegmentShape(full, row_bytes, moved=False)
    last = SegmentShape(rest, row_bytes, moved=False).file_bytes if rest else 0
    return whole * shape.file_bytes + last
