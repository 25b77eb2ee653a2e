# SPDX-License-Identifier: Apache-2.0
"""How a plan reads: plain text with units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxsparse.planner import Plan

MAX_TABLES = 40
"""Most tables listed; the largest come first, the rest is counted."""


def format_bytes(count: float) -> str:
    """Bytes with a binary unit.

    >>> format_bytes(160_000), format_bytes(512), format_bytes(3 * 2**30)
    ('156.2 KiB', '512 B', '3.0 GiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def counted(count: int, what: str) -> str:
    """A number of things.

    >>> counted(1, "slab"), counted(2000, "device")
    ('1 slab', '2,000 devices')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def describe_plan(plan: Plan) -> str:
    """The text of `Plan.describe`."""
    slabs = plan.layout.slabs
    tables = counted(sum(len(slab.tables) for slab in slabs), "table")
    have = "" if plan.device_bytes is None else f", each with {format_bytes(plan.device_bytes)}"
    devices = counted(plan.num_shards, "device")
    title = f"{tables} in {counted(len(slabs), 'slab')} on {devices}{have}"
    return "\n".join([title, "", *_tables(plan), "", *_devices(plan), "", _balance(plan)])


def _tables(plan: Plan) -> list[str]:
    blocks = [(slab, block) for slab in plan.layout.slabs for block in slab.tables]
    blocks.sort(key=lambda pair: -pair[1].spec.vocabulary_size * pair[0].dim)
    rows: list[Sequence[str]] = [("table", "placement", "rows", "dim", "rows/device", "slab")]
    for slab, block in blocks[:MAX_TABLES]:
        where = "" if block.shard is None else f" on {block.shard}"
        spec = block.spec
        counts = f"{spec.vocabulary_size:,}", str(slab.dim), f"{block.rows:,}"
        rows.append((spec.name, block.placement + where, *counts, slab.name))
    more = len(blocks) - MAX_TABLES
    return align(rows, left=(0, 1, 5)) + ([f"... and {more} more"] if more > 0 else [])


def _devices(plan: Plan) -> list[str]:
    """Bytes of each device by kind; neighbours that are alike share a line."""
    kinds = [kind for kind, held in plan.bytes_by_kind.items() if any(held)]
    heads = [" ".join(kind).strip() for kind in kinds]
    rows: list[Sequence[str]] = [("device", *heads, "total", "load")]
    lines = [
        (*(format_bytes(plan.bytes_by_kind[k][s]) for k in kinds), format_bytes(total), f"{load:g}")
        for s, (total, load) in enumerate(zip(plan.bytes_per_device, plan.load, strict=True))
    ]
    start = 0
    for s, line in enumerate(lines):
        if s + 1 == len(lines) or lines[s + 1] != line:
            rows.append((str(s) if s == start else f"{start}-{s}", *line))
            start = s + 1
    return align(rows, left=(0,))


def _balance(plan: Plan) -> str:
    total = sum(plan.bytes_per_device)
    return (
        f"bytes on all devices: {format_bytes(total)} ({total:,}); "
        f"load balance (fullest / mean): {plan.balance:.3f}\n"
        "load: embedding values read per sample (ids x dim), unless the plan was given another"
    )


def align(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Columns two spaces apart, flush right but for those in ``left``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
