# SPDX-License-Identifier: Apache-2.0
"""Pooling and its gradients by kernels, along a `BagPlan`: what `pooling.py` does along levels.

Per-device blocks, one slab at a time. No array with a row per id is made: kernels go from the
table to the bags, and from the bags' gradients to the distinct rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxsparse.bag_plan import BagPlan
from jaxsparse.ops.embedding_bag import embedding_bag
from jaxsparse.ops.paths import Path
from jaxsparse.ops.segment_sum import BagGradients
from jaxsparse.packed import PackedIds, SlabIds
from jaxsparse.packing import bag_width
from jaxsparse.pooling import Activations, Specs, bag_scale


def pool_bags(
    table: jax.Array,
    rows: jax.Array | None,
    slab: SlabIds,
    plan: BagPlan,
    ids: PackedIds,
    specs: Specs,
    path: Path,
) -> Activations:
    """Pools one slab's features.

    Args:
        table: ``[R, D]`` this device's part of the slab, or ``[S * C, D]`` the distinct rows it
            asked for.
        rows: ``[S * C]`` int32 where the distinct rows lie in the former; None for the latter.
        slab: the slab's ids.
        plan: their plan.
        ids: the batch, for bag lengths.
        specs: features by name.
        path: which kernels.

    Returns:
        ``[b, D]`` per pooled feature, ``[b, max_length, D]`` per unpooled one.
    """
    names, samples = _features(slab), ids.padded_samples
    pooled = embedding_bag(
        table,
        rows,
        slab.inverse,
        plan.bag_offsets,
        _weights(slab),
        _scales(slab, ids, specs),
        parts=tuple(samples * bag_width(specs[name]) for name in names),
        implementation=path,
    )
    acts: Activations = dict(zip(names, pooled, strict=True))
    for name in names:
        if specs[name].combiner is None:
            acts[name] = acts[name].reshape(samples, bag_width(specs[name]), table.shape[1])
    return acts


def bag_row_gradients(
    grads: Activations, slab: SlabIds, plan: BagPlan, ids: PackedIds, specs: Specs
) -> BagGradients:
    """Gradients ``[S * C, D]`` float32 of the distinct rows this device asked for, to be summed.

    Args:
        grads: gradients of `pool_bags`' result, same shapes.
        slab: the slab's ids.
        plan: their plan.
        ids: the batch.
        specs: features by name.
    """
    return BagGradients(
        _by_feature(grads, slab),
        plan.row_offsets,
        plan.row_bags,
        plan.row_ids,
        _weights(slab),
        _scales(slab, ids, specs),
    )


def bag_weight_gradients(
    vectors: jax.Array,
    grads: Activations,
    slab: SlabIds,
    plan: BagPlan,
    ids: PackedIds,
    specs: Specs,
) -> jax.Array:
    """Gradients of per-id weights: <row before the update, gradient of its bag>.

    Returns:
        ``[M']`` float32, in buffer order.
    """
    if slab.weights is None or plan.row_ids is None:
        raise ValueError("weight_gradients: the ids of this slab have no weights")
    num_ids, num_weights = slab.inverse.shape[0], slab.weights.shape[0]
    by_bag = jnp.concatenate(_by_feature(grads, slab))
    scales = _scales(slab, ids, specs)
    if scales is not None:
        by_bag = by_bag * scales[:, None]
    bag = jnp.full(num_ids, by_bag.shape[0], jnp.int32)
    bag = bag.at[plan.row_ids].set(plan.row_bags, mode="drop")[num_ids - num_weights :]
    rows = vectors.at[slab.inverse[num_ids - num_weights :]].get(mode="fill", fill_value=0)
    return jnp.sum(rows * by_bag.at[bag].get(mode="fill", fill_value=0), axis=1)


def _features(slab: SlabIds) -> tuple[str, ...]:
    """Features in the order of bags."""
    return (*(name for name, _ in slab.fixed), *slab.ragged)


def _by_feature(grads: Activations, slab: SlabIds) -> tuple[jax.Array, ...]:
    """Gradients of bags, ``[b * width, D]`` float32 by feature."""
    return tuple(
        grads[name].astype(jnp.float32).reshape(-1, grads[name].shape[-1])
        for name in _features(slab)
    )


def _weights(slab: SlabIds) -> jax.Array | None:
    """``[M]`` by id, 1 for the fixed ones; None without weights."""
    if slab.weights is None:
        return None
    num_fixed = slab.inverse.shape[0] - slab.weights.shape[0]
    return jnp.concatenate([jnp.ones(num_fixed, jnp.float32), slab.weights])


def _scales(slab: SlabIds, ids: PackedIds, specs: Specs) -> jax.Array | None:
    """``[O]`` what each bag's sum is multiplied with; None where that is 1 throughout."""
    widths = dict(slab.fixed)
    # A fixed feature of one id has bags of that id, or of none: their mean is their sum.
    scaled = {
        name: specs[name].combiner not in (None, "sum") and widths.get(name) != 1
        for name in _features(slab)
    }
    if not any(scaled.values()):
        return None
    return jnp.concatenate(
        [
            bag_scale(ids, specs[name])[:, 0]
            if is_scaled
            else jnp.ones(ids.padded_samples * bag_width(specs[name]), jnp.float32)
            for name, is_scaled in scaled.items()
        ]
    )
