# SPDX-License-Identifier: Apache-2.0
"""Vectors of ids become activations of features, and activation gradients row gradients.

Per-device blocks: b samples, C rows per owner, one slab at a time. The number of operations grows
with slabs (and with slices of views), not with ids.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxsparse.bag_plan import LevelPlan
from jaxsparse.ops.segment_sum import sum_levels
from jaxsparse.packed import PackedIds, SlabIds
from jaxsparse.packing import bag_width
from jaxsparse.specs import FeatureSpec

Specs = Mapping[str, FeatureSpec]
Activations = dict[str, jax.Array]


def pool(vectors: jax.Array, slab: SlabIds, ids: PackedIds, specs: Specs) -> Activations:
    """Pools one slab's features.

    Args:
        vectors: ``[S * C, D]`` float32, distinct rows this device asked for.
        slab: the slab's ids.
        ids: the batch, for bag lengths.
        specs: features by name.

    Returns:
        ``[b, D]`` per pooled feature, ``[b, max_length, D]`` per unpooled one.
    """
    samples, dim = ids.padded_samples, vectors.shape[1]
    per_id = vectors.at[slab.inverse].get(mode="fill", fill_value=0)
    acts: Activations = {}
    start = 0
    for name, width in slab.fixed:
        part = per_id[start : start + samples * width].reshape(samples, width, dim)
        start += samples * width
        if specs[name].combiner is None:
            acts[name] = _pad_bag(part, bag_width(specs[name]))
        else:
            pooled = part[:, 0] if width == 1 else part.sum(axis=1)
            acts[name] = pooled * bag_scale(ids, specs[name])
    if slab.ragged:
        acts |= _pool_ragged(per_id[start:], slab, ids, specs)
    return acts


def _pool_ragged(per_id: jax.Array, slab: SlabIds, ids: PackedIds, specs: Specs) -> Activations:
    samples, dim = ids.padded_samples, per_id.shape[1]
    if slab.weights is not None:
        per_id = per_id * slab.weights[:, None]
    widths = {name: bag_width(specs[name]) for name in slab.ragged}
    bags = sum_levels(per_id, _levels(slab).bag_levels, samples * sum(widths.values()))
    acts: Activations = {}
    start = 0
    for name, width in widths.items():
        part = bags[start : start + samples * width]
        start += samples * width
        if specs[name].combiner is None:
            acts[name] = part.reshape(samples, width, dim)
        else:
            acts[name] = part * bag_scale(ids, specs[name])
    return acts


def row_gradients(grads: Activations, slab: SlabIds, ids: PackedIds, specs: Specs) -> jax.Array:
    """Gradients of the distinct rows this device asked for, summed over their ids.

    Args:
        grads: gradients of `pool`'s result, same shapes.
        slab: the slab's ids.
        ids: the batch.
        specs: features by name.

    Returns:
        ``[S * C, D]`` float32.
    """
    samples = ids.padded_samples
    parts = []
    for name, width in slab.fixed:
        grad = grads[name].astype(jnp.float32)
        if specs[name].combiner is None:
            grad = grad[:, :width]
        else:
            grad = grad * bag_scale(ids, specs[name])
            grad = jnp.broadcast_to(grad[:, None], (samples, width, grad.shape[-1]))
        parts.append(grad.reshape(samples * width, grad.shape[-1]))
    if slab.ragged:
        per_id = _bag_gradients(grads, slab, ids, specs)
        parts.append(per_id if slab.weights is None else per_id * slab.weights[:, None])
    per_id = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return sum_levels(per_id, _levels(slab).row_levels, slab.rows.shape[0])


def weight_gradients(
    vectors: jax.Array, grads: Activations, slab: SlabIds, ids: PackedIds, specs: Specs
) -> jax.Array:
    """Gradients of per-id weights: <row before the update, gradient of its bag>.

    Returns:
        ``[M']`` float32, in buffer order.
    """
    inverse = slab.inverse[slab.inverse.shape[0] - _levels(slab).bag.shape[0] :]
    rows = vectors.at[inverse].get(mode="fill", fill_value=0)
    return jnp.sum(rows * _bag_gradients(grads, slab, ids, specs), axis=1)


def _bag_gradients(grads: Activations, slab: SlabIds, ids: PackedIds, specs: Specs) -> jax.Array:
    """``[M', D]``: what one unit of each ragged id receives from its bag."""
    bags = []
    for name in slab.ragged:
        grad = grads[name].astype(jnp.float32)
        if specs[name].combiner is not None:
            grad = grad * bag_scale(ids, specs[name])
        bags.append(grad.reshape(-1, grad.shape[-1]))
    return jnp.concatenate(bags).at[_levels(slab).bag].get(mode="fill", fill_value=0)


def bag_scale(ids: PackedIds, spec: FeatureSpec) -> jax.Array:
    """``[b, 1]``: what a bag's sum is multiplied with; the length counts ids, not weights."""
    if spec.combiner == "sum":
        return jnp.ones((1, 1), jnp.float32)
    length = jnp.maximum(ids.lengths(spec.name), 1).astype(jnp.float32)[:, None]
    return 1 / length if spec.combiner == "mean" else 1 / jnp.sqrt(length)


def _pad_bag(bags: jax.Array, width: int) -> jax.Array:
    return jnp.pad(bags, ((0, 0), (0, width - bags.shape[1]), (0, 0)))


def _levels(slab: SlabIds) -> LevelPlan:
    assert isinstance(slab.plan, LevelPlan)
    return slab.plan
