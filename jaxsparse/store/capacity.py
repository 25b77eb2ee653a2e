# SPDX-License-Identifier: Apache-2.0
"""What a row store takes of the host's memory, said before anything is allocated."""

from __future__ import annotations

from jaxsparse.planner import slot_bytes, weight_bytes
from jaxsparse.resident import device_rows
from jaxsparse.specs import TableSpec

KEY_BYTES = 17
"""Of the index, a key: at most, growth included."""

ROW_BYTES = 29
"""Of arrays with an entry a row: hotness, occurrences, last batch, place, slot in memory, two
marks of four bytes each, and one that is a byte."""

GROWTH_SHARE = 1.15
"""Arrays grow by 1.3: what they take of what is in use, on average."""

PLACE_BYTES = 16
"""Of a place on the devices: its code, who is there, whether it is free."""

DISK_ROW_BYTES = 8 + 1.5 * 13
"""Of a row on a disk: its location; checksum, key and mark of it and of half as much garbage."""

DISK_BUFFER_BYTES = 7 * (8 << 20)
"""Segments being filled and written."""

MOVED_COPIES = 4
"""Of the rows of half a slab, while they are read, cross the boundary and land."""


def host_bytes(table: TableSpec, num_rows: int) -> dict[str, int]:
    """Bytes of the host's memory for a stored table, by what they are for.

    Args:
        table: with Dynamic keys or tiers.
        num_rows: keys with a row.

    >>> from jaxsparse import Dynamic, TableSpec, Tiers
    >>> spec = TableSpec("t", embedding_dim=64, keys=Dynamic(10**9), tiers=Tiers(device_rows=10**7))
    >>> {what: f"{count / 1e9:.1f} GB" for what, count in host_bytes(spec, 10**9).items()}
    {'keys': '50.4 GB', 'places': '0.2 GB', 'rows': '506.9 GB', 'disk index': '0.0 GB', \
'buffers': '10.2 GB'}
    """
    tiers, on_device = table.tiers, min(device_rows(table), num_rows)
    row = weight_bytes(table, 1) + slot_bytes(table, 1)
    elsewhere = 0 if tiers is None else num_rows - on_device
    in_memory = elsewhere
    if tiers is not None and tiers.host_rows is not None:
        in_memory = min(elsewhere, tiers.host_rows)
    on_disk = elsewhere - in_memory
    buffers = 0 if tiers is None else MOVED_COPIES * on_device // 2 * row
    return {
        "keys": round(num_rows * (KEY_BYTES + ROW_BYTES * GROWTH_SHARE)),
        "places": PLACE_BYTES * device_rows(table),
        "rows": in_memory * row,
        "disk index": round(on_disk * DISK_ROW_BYTES),
        "buffers": buffers + (DISK_BUFFER_BYTES if on_disk else 0),
    }
