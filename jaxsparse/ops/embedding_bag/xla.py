# SPDX-License-Identifier: Apache-2.0
"""`embedding_bag` on any XLA backend."""

from __future__ import annotations

from itertools import accumulate

import jax
import jax.numpy as jnp

from jaxsparse.ops.segment_sum.grouped import segment_sum_xla


def embedding_bag_xla(
    parts: tuple[int, ...],
    table: jax.Array,
    rows: jax.Array | None,
    slots: jax.Array,
    offsets: jax.Array | None,
    weights: jax.Array | None,
    scale: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """`embedding_bag` as a gather and sums by group."""
    at = slots if rows is None else take(rows, slots, -1)
    values = take(table, at, 0).astype(jnp.float32)
    if weights is not None:
        values = values * weights[:, None]
    sums = values if offsets is None else segment_sum_xla(values, offsets, None)
    if scale is not None:
        sums = sums * scale[:, None]
    ends = list(accumulate(parts, initial=0))
    return tuple(sums[start : start + part] for start, part in zip(ends, parts, strict=False))


def take(array: jax.Array, index: jax.Array, fill: int) -> jax.Array:
    """``array[index]`` with ``fill`` where the index is out of range; a negative one is, too."""
    if array.shape[0] == 0:
        return jnp.full((index.shape[0], *array.shape[1:]), fill, array.dtype)
    index = jnp.where(index < 0, array.shape[0], index)
    return array.at[index].get(mode="fill", fill_value=fill)
