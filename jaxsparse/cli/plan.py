# SPDX-License-Identifier: Apache-2.0
"""``jaxsparse plan``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax

from jaxsparse.cli.plan_tiers import describe_hosts, hosts_as_json, plan_hosts
from jaxsparse.cli.resolve import config_errors, make_features, resolve
from jaxsparse.cli.run_config import load_config
from jaxsparse.config import ConfigError
from jaxsparse.planner import Plan, load_of, plan
from jaxsparse.resident import resident_table
from jaxsparse.store.capacity import HostPlan

MAX_DEVICES = 1 << 16
"""Most devices planned for, more than any job has: each costs time and memory here."""


def run_plan(
    run: str | None, assignments: Sequence[str], num_devices: int | None, *, only_json: bool
) -> int:
    """Prints the plan and returns the exit code; no data is read and nothing allocated.

    Args:
        run: the run's TOML.
        assignments: of ``--set``.
        num_devices: devices to plan for; None is ``mesh.devices``, else those there are.
        only_json: print one line of JSON instead of the table.
    """
    if num_devices is not None and not 1 <= num_devices <= MAX_DEVICES:
        raise ConfigError(f"--devices: must be in 1..{MAX_DEVICES:,}, got {num_devices:,}")
    config, source = load_config(run, assignments)
    with config_errors(source):
        config = resolve(config, source)
        features = make_features(config)
        tables = {feature.table.name: feature.table for feature in features}
        count = num_devices or config.mesh.devices or len(jax.devices())
        resident = [resident_table(table) for table in tables.values()]
        made = plan(resident, count, load=load_of(features))
        hosts = plan_hosts(list(tables.values()))
    if only_json:
        print(json.dumps(_as_json(made, hosts)))
        return 0
    print(made.describe())
    if hosts:
        print(f"\n{describe_hosts(hosts)}")
    return 0


def _as_json(made: Plan, hosts: dict[str, HostPlan]) -> dict[str, Any]:
    stored = {"stored": hosts_as_json(hosts)} if hosts else {}
    return {
        **stored,
        "devices": made.num_shards,
        "placements": dict(made.placements),
        "bytes_per_device": max(made.bytes_per_device),
        "bytes": sum(made.bytes_per_device),
        "load_balance": made.balance,
    }
