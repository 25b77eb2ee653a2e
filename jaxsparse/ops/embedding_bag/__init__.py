# SPDX-License-Identifier: Apache-2.0
"""Rows of a table summed by bag, without an array of all of them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxsparse.ops.embedding_bag.cpu import embedding_bag_native
from jaxsparse.ops.embedding_bag.gpu import embedding_bag_triton
from jaxsparse.ops.embedding_bag.xla import embedding_bag_xla
from jaxsparse.ops.native.derivatives import derived_from
from jaxsparse.ops.platforms import Implementation, run_on_platform
from jaxsparse.ops.shapes import Shapes

__all__ = ["embedding_bag"]


def embedding_bag(
    table: jax.Array,
    rows: jax.Array | None,
    slots: jax.Array,
    offsets: jax.Array | None = None,
    weights: jax.Array | None = None,
    scale: jax.Array | None = None,
    *,
    parts: tuple[int, ...] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Sums rows of a table by bag: ``scale[o] * sum(weights[i] * table[rows[slots[i]]])``.

    Sums are exact to float32 rounding however long a bag is, and depend on nothing but the
    arguments. An index outside its range reads zeros.

    Args:
        table: ``[R, D]`` float32 or bfloat16.
        rows: ``[K]`` int32 row of each slot; None where slots are rows.
        slots: ``[M]`` int32 of each id.
        offsets: ``[O + 1]`` int32 ascending: ids ``offsets[o]`` to ``offsets[o + 1]`` are bag o.
            None where id o is bag o.
        weights: ``[M]`` float32 by id; None means 1.
        scale: ``[O]`` float32 by bag; None means 1.
        parts: number of bags of each result, O in all; None for one result.
        implementation: ``xla``, ``native`` or ``triton``; None for the best.

    Returns:
        By part ``[parts_f, D]`` float32; the native kernel writes each where it stays.

    Raises:
        ValueError: shapes or dtypes are others, ``parts`` do not add up to O, or there is no such
            implementation.
        RuntimeError: the native one is asked for and is not there.

    >>> table = jnp.array([[1.0, 2.0], [10.0, 20.0]])
    >>> (pooled,) = embedding_bag(table, None, jnp.array([0, 1, 1]), jnp.array([0, 2, 3]))
    >>> pooled.tolist()
    [[11.0, 22.0], [10.0, 20.0]]
    """
    args = jax.tree.map(jnp.asarray, (table, rows, slots, offsets, weights, scale))
    num_bags = _num_bags(*args)
    parts = (num_bags,) if parts is None else parts
    if sum(parts) != num_bags or min(parts, default=0) < 0:
        raise ValueError(
            f"embedding_bag: parts must be 0 or more and add up to {num_bags}, got {parts}"
        )
    xla, native = partial(embedding_bag_xla, parts), partial(embedding_bag_native, parts)
    kernels: dict[str, Implementation] = {
        "xla": xla,
        "native": derived_from(xla, native),
        "triton": derived_from(xla, partial(embedding_bag_triton, parts)),
    }
    pooled: tuple[jax.Array, ...] = run_on_platform("embedding_bag", implementation, kernels, *args)
    return pooled


def _num_bags(
    table: jax.Array,
    rows: jax.Array | None,
    slots: jax.Array,
    offsets: jax.Array | None,
    weights: jax.Array | None,
    scale: jax.Array | None,
) -> int:
    """O; raises where the arguments do not fit together."""
    shapes = Shapes("embedding_bag")
    shapes.check("table", table, "R, D", jnp.float32, jnp.bfloat16)
    shapes.check("rows", rows, "K", jnp.int32)
    shapes.check("slots", slots, "M", jnp.int32)
    shapes.check("offsets", offsets, "O + 1", jnp.int32)
    shapes.check("weights", weights, "M", jnp.float32)
    num_bags = shapes.sizes.setdefault("O", shapes.sizes["M"])
    shapes.check("scale", scale, "O", jnp.float32)
    return num_bags
