# SPDX-License-Identifier: Apache-2.0
"""Meshes the tables are spread over."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def make_mesh(nodes: int | None = None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over all devices: axis ``"shard"``, or ``("node", "shard")`` with ``nodes``.

    Rows and samples are spread over all axes flattened, so the second form changes only the
    route rows take. Any other `jax.sharding.Mesh` with Auto axes serves as well.

    Args:
        nodes: number of nodes; must divide the number of devices.
        devices: devices in mesh order; default `jax.devices()`.

    Raises:
        ValueError: ``nodes`` does not divide the devices, or there are none.

    >>> make_mesh(devices=jax.devices()[:1]).axis_names
    ('shard',)
    """
    chosen = np.array(list(jax.devices() if devices is None else devices), dtype=object)
    if chosen.size == 0:
        raise ValueError("make_mesh: devices is empty, expected at least one")
    if nodes is None:
        return Mesh(chosen, ("shard",), axis_types=(AxisType.Auto,))
    if nodes <= 0 or chosen.size % nodes:
        raise ValueError(
            f"make_mesh: nodes must divide the number of devices {chosen.size}, got {nodes}"
        )
    grid = chosen.reshape(nodes, -1)
    return Mesh(grid, ("node", "shard"), axis_types=(AxisType.Auto, AxisType.Auto))
