# SPDX-License-Identifier: Apache-2.0
"""Sums by group on any XLA backend: `segment_sum` and `bag_gradients`.

As in `levels.py` no slot adds more than `FAN_IN` terms at a time; here the chunks are found on the
device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxsparse.ops.segment_sum.levels import FAN_IN, level_sizes


def segment_sum_xla(values: jax.Array, offsets: jax.Array, order: jax.Array | None) -> jax.Array:
    """`segment_sum` as scatters, a chunk of `FAN_IN` terms of one group into one slot."""
    num_groups = offsets.shape[0] - 1
    size = values.shape[0] if order is None else order.shape[0]
    if size == 0 or num_groups == 0 or values.shape[0] == 0:
        return jnp.zeros((num_groups, values.shape[1]), values.dtype)
    if order is not None:
        order = jnp.where(order < 0, values.shape[0], order)
        values = values.at[order].get(mode="fill", fill_value=0)
    place = lax.iota(jnp.int32, size)
    group = jnp.searchsorted(offsets, place, side="right", method="scan_unrolled") - 1
    group = jnp.where((group < 0) | (group >= num_groups), num_groups, group)
    place = place - offsets.at[group].get(mode="clip")
    for _ in level_sizes(size):
        is_head = (place % FAN_IN == 0) | (lax.iota(jnp.int32, size) == 0)
        chunk = jnp.cumsum(is_head.astype(jnp.int32)) - 1
        size = min(size, size // FAN_IN + num_groups + 2)
        sums = jnp.zeros((size, values.shape[1]), values.dtype)
        values = sums.at[chunk].add(values, mode="drop")
        group = jnp.full(size, num_groups, jnp.int32).at[chunk].set(group, mode="drop")
        place = jnp.zeros(size, jnp.int32).at[chunk].set(place // FAN_IN, mode="drop")
    sums = jnp.zeros((num_groups, values.shape[1]), values.dtype)
    return sums.at[group].add(values, mode="drop")


def bag_gradients_xla(
    grads: tuple[jax.Array, ...],
    offsets: jax.Array,
    bags: jax.Array,
    ids: jax.Array | None,
    weights: jax.Array | None,
    scale: jax.Array | None,
) -> jax.Array:
    """`bag_gradients` as a gather and sums by group."""
    by_bag = jnp.concatenate(grads) if len(grads) > 1 else grads[0]
    if scale is not None:
        by_bag = by_bag * scale[:, None]
    if weights is None or ids is None:
        return segment_sum_xla(by_bag, offsets, bags)
    bags = jnp.where(bags < 0, by_bag.shape[0], bags)
    ids = jnp.where(ids < 0, weights.shape[0], ids)
    per_id = by_bag.at[bags].get(mode="fill", fill_value=0)
    per_id = per_id * weights.at[ids].get(mode="fill", fill_value=0)[:, None]
    return segment_sum_xla(per_id, offsets, None)
