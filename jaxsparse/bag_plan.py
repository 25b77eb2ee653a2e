# SPDX-License-Identifier: Apache-2.0
"""Who adds into whom: the two forms in which a batch's sums are planned on the host.

A bag is a row of a slab's activations: for every feature, fixed ones first, ``b * width`` of them,
width being 1 for a pooled feature and its bag's length for an unpooled one. O counts all bags of a
device, M its ids, M' the ragged ones among them, K = S * C its places for distinct rows. All
arrays are those of every device, one after the other.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("row_levels", "bag", "bag_levels"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class LevelPlan:
    """Sums as scatters, level by level: for XLA on any platform."""

    row_levels: tuple[jax.Array, ...]
    """`plan_levels` that sum ids into distinct rows."""
    bag: jax.Array
    """``[N * M']`` int32: bag of each ragged id, counted from the first ragged bag."""
    bag_levels: tuple[jax.Array, ...]
    """`plan_levels` that sum ragged ids into bags."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("bag_offsets", "row_offsets", "row_bags", "row_ids"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class BagPlan:
    """Sums as compressed sparse rows, in both directions: for kernels."""

    bag_offsets: jax.Array | None
    """``[N * (O + 1)]`` int32: ids ``bag_offsets[o]`` to ``bag_offsets[o + 1]`` are bag o; None
    where every bag is one id."""
    row_offsets: jax.Array
    """``[N * (K + 1)]`` int32: the ids of distinct row k are entries ``row_offsets[k]`` to
    ``row_offsets[k + 1]`` of the two below."""
    row_bags: jax.Array
    """``[N * M]`` int32: bag of each id, ids grouped by distinct row; O behind the last."""
    row_ids: jax.Array | None
    """``[N * M]`` int32: place in the buffer of those ids, M behind the last; None where ids have
    no weights."""
