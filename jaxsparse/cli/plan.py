# SPDX-License-Identifier: Apache-2.0
"""``jaxsparse plan``."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxsparse.cli.resolve import config_errors, make_features, resolve
from jaxsparse.cli.run_config import load_config
from jaxsparse.config import ConfigError
from jaxsparse.planner import load_of, plan


def run_plan(run: str | None, assignments: Sequence[str], num_devices: int | None) -> int:
    """Prints the plan and returns the exit code; no data is read and nothing allocated.

    Args:
        run: the run's TOML.
        assignments: of ``--set``.
        num_devices: devices to plan for; None is ``mesh.devices``, else those there are.
    """
    if num_devices is not None and num_devices < 1:
        raise ConfigError(f"--devices: must be >= 1, got {num_devices}")
    config, source = load_config(run, assignments)
    with config_errors(source):
        config = resolve(config, source)
        features = make_features(config)
        tables = {feature.table.name: feature.table for feature in features}
        count = num_devices or config.mesh.devices or len(jax.devices())
        made = plan(list(tables.values()), count, load=load_of(features))
    print(made.describe())
    return 0
