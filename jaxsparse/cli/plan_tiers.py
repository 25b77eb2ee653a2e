# SPDX-License-Identifier: Apache-2.0
"""How the tiers of a plan read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxsparse.plan_text import align, format_bytes
from jaxsparse.specs import TableSpec
from jaxsparse.store.capacity import HostPlan, plan_host


def plan_hosts(tables: Sequence[TableSpec]) -> dict[str, HostPlan]:
    """What the tables of a row store take on the host, by name."""
    return {table.name: plan_host(table) for table in tables if table.is_stored}


def describe_hosts(plans: Mapping[str, HostPlan]) -> str:
    """Rows and bytes by tier of full tables."""
    heads = ("table, when full", "row", "on devices", "in memory", "on disks")
    rows: list[Sequence[str]] = [(*heads, "index", "counters", "for disks", "host memory")]
    for name, plan in plans.items():
        tiers = (
            (plan.device_rows, plan.device_rows * plan.row_bytes),
            (plan.ram_rows, plan.ram_bytes),
            (plan.disk_rows, plan.disk_bytes),
        )
        told = [f"{count:,} rows {format_bytes(size)}" if count else "-" for count, size in tiers]
        host = (plan.index_bytes, plan.counter_bytes, plan.disk_memory_bytes, plan.host_bytes)
        rows.append((name, format_bytes(plan.row_bytes), *told, *map(format_bytes, host)))
    memory = sum(plan.host_bytes for plan in plans.values())
    disk = sum(plan.disk_bytes for plan in plans.values())
    total = f"host memory for rows: {format_bytes(memory)} ({memory:,})"
    if disk:
        total += f"; disks: {format_bytes(disk)}, up to twice that with garbage"
    return "\n".join([*align(rows, left=(0,)), "", total])


def hosts_as_json(plans: Mapping[str, HostPlan]) -> dict[str, Any]:
    """The same for programs."""
    return {
        name: {**dataclasses.asdict(plan), "host_bytes": plan.host_bytes}
        for name, plan in plans.items()
    }
