# SPDX-License-Identifier: Apache-2.0
"""Rows of a table read and pooled by bag on a GPU; ``[M, D]`` is never made."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.ops.segment_sum.grouped_gpu import GroupedSum
from jaxsparse.ops.triton import Ref, Tile, launch, load_at, make_tile


def embedding_bag_triton(
    parts: tuple[int, ...],
    table: jax.Array,
    rows: jax.Array | None,
    slots: jax.Array,
    offsets: jax.Array | None = None,
    weights: jax.Array | None = None,
    scale: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Sums rows of a table by bag; see `jaxsparse.ops.embedding_bag.embedding_bag`.

    Args:
        parts: number of bags of each result.
        table: ``[R, D]`` float32 or bfloat16.
        rows: ``[K]`` int32, or None where slots are rows.
        slots: ``[M]`` int32.
        offsets: ``[O + 1]`` int32, or None where id o is bag o.
        weights: ``[M]`` float32, or None.
        scale: ``[O]`` float32, or None.
        interpret: True runs without a GPU.

    Returns:
        By part ``[parts_f, D]`` float32, slices of one array.

    Raises:
        ValueError: rows are too wide for a tile.
    """
    num_bags = slots.shape[0] if offsets is None else offsets.shape[0] - 1
    if table.shape[0] == 0 or (rows is not None and rows.shape[0] == 0):
        return _cut(jnp.zeros((num_bags, table.shape[1]), jnp.float32), parts)
    tile = make_tile("embedding_bag", table.shape[1], num_bags)
    refs = {"table": table, "rows": rows, "slots": slots, "weights": weights, "scale": scale}
    if offsets is None:
        return _cut(_gather(tile, refs, num_bags, interpret), parts)
    pooled = GroupedSum(
        name="embedding_bag",
        tile=tile,
        num_items=slots.shape[0],
        num_segments=num_bags,
        items=_Items(tile),
        finish=_scaled,
    )
    return _cut(pooled(refs, offsets, interpret=interpret), parts)


def _cut(pooled: jax.Array, parts: tuple[int, ...]) -> tuple[jax.Array, ...]:
    if len(parts) == 1:
        return (pooled,)
    return tuple(jnp.split(pooled, list(accumulate(parts[:-1]))))


def _gather(tile: Tile, refs: dict[str, Any], num_bags: int, interpret: bool) -> jax.Array:
    """Every bag is one id: no loop."""
    shape = jax.ShapeDtypeStruct((num_bags, tile.dim), jnp.float32)
    if num_bags == 0:
        return jnp.zeros(shape.shape, shape.dtype)

    def kernel(refs: dict[str, Any], out: Ref) -> None:
        bags = tile.row_numbers()
        mask = bags < num_bags
        values = _Items(tile)(refs, bags, mask)
        tile.store(out, bags, mask, _scaled(refs, bags, mask, values))

    result: jax.Array = launch(
        kernel,
        refs,
        name="embedding_gather",
        out_shape=shape,
        num_programs=-(-num_bags // tile.rows),
        interpret=interpret,
    )
    return result


class _Items:
    """One id's row, times its weight."""

    def __init__(self, tile: Tile):
        self.tile = tile

    def __call__(self, refs: dict[str, Any], at: jax.Array, mask: jax.Array) -> jax.Array:
        rows = load_at(refs["slots"], at, mask, -1)
        if refs["rows"] is not None:
            known = (rows >= 0) & (rows < refs["rows"].shape[0])
            rows = load_at(refs["rows"], rows, known, -1)
        inside = (rows >= 0) & (rows < refs["table"].shape[0])
        items = self.tile.load(refs["table"], rows, inside).astype(jnp.float32)
        if refs["weights"] is not None:
            items = items * load_at(refs["weights"], at, inside)[:, None]
        return items


def _scaled(refs: dict[str, Any], bags: jax.Array, mask: jax.Array, sums: jax.Array) -> jax.Array:
    if refs["scale"] is None:
        return sums
    return sums * load_at(refs["scale"], bags, mask)[:, None]
