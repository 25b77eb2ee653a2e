# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients by distinct row on a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.ops.segment_sum.grouped_gpu import GroupedSum
from jaxsparse.ops.triton import Tile, load_at, make_tile


def bag_gradients_triton(
    grads: tuple[jax.Array, ...],
    offsets: jax.Array,
    bags: jax.Array | None,
    ids: jax.Array | None = None,
    weights: jax.Array | None = None,
    scale: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The transpose of `embedding_bag`; see `jaxsparse.ops.segment_sum.bag_gradients`.

    Args:
        grads: arrays ``[parts_f, D]`` float32 whose concatenation is ``[O, D]``.
        offsets: ``[K + 1]`` int32, ascending.
        bags: ``[M]`` int32; None where entry j is of bag j.
        ids: ``[M]`` int32, where there are weights.
        weights: float32 by id, or None.
        scale: ``[O]`` float32, or None.
        interpret: True runs without a GPU.

    Returns:
        ``[K, D]`` float32.

    Raises:
        ValueError: rows are too wide for a tile.
    """
    # XLA makes no copy where the parts are slices of one array, in order.
    joined = grads[0] if len(grads) == 1 else jnp.concatenate(grads)
    num_segments = offsets.shape[0] - 1
    if joined.shape[0] == 0:
        return jnp.zeros((num_segments, joined.shape[1]), jnp.float32)
    tile = make_tile("bag_gradients", joined.shape[1], num_segments)
    refs = {"grads": joined, "bags": bags, "ids": ids, "weights": weights, "scale": scale}
    summed = GroupedSum(
        name="bag_gradients",
        tile=tile,
        num_items=(joined if bags is None else bags).shape[0],
        num_segments=num_segments,
        items=_Items(tile),
        finish=lambda refs, segments, mask, sums: sums,
    )
    return summed(refs, offsets, interpret=interpret)


def segment_sum_triton(
    values: jax.Array,
    offsets: jax.Array,
    order: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Sums rows by segment; see `jaxsparse.ops.segment_sum.segment_sum`.

    Args:
        values: ``[N, D]`` float32.
        offsets: ``[K + 1]`` int32, ascending.
        order: ``[M]`` int32 row of each entry, None where entry j is row j.
        interpret: True runs without a GPU.

    Returns:
        ``[K, D]`` float32.
    """
    return bag_gradients_triton((values,), offsets, order, interpret=interpret)


class _Items:
    """One entry's share of a row's gradient."""

    def __init__(self, tile: Tile):
        self.tile = tile

    def __call__(self, refs: dict[str, Any], at: jax.Array, mask: jax.Array) -> jax.Array:
        bags = at if refs["bags"] is None else load_at(refs["bags"], at, mask, -1)
        mask = mask & (bags >= 0) & (bags < refs["grads"].shape[0])
        items = self.tile.load(refs["grads"], bags, mask)
        if refs["weights"] is not None:
            ids = load_at(refs["ids"], at, mask, -1)
            known = mask & (ids >= 0) & (ids < refs["weights"].shape[0])
            items = items * load_at(refs["weights"], ids, known)[:, None]
        if refs["scale"] is not None:
            items = items * load_at(refs["scale"], bags, mask)[:, None]
        return items
