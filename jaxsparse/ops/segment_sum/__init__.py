# SPDX-License-Identifier: Apache-2.0
"""Sums of rows by segment, accurate for hot segments and in an order the run does not change."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.ops.native.derivatives import derived_from
from jaxsparse.ops.platforms import run_on_platform
from jaxsparse.ops.segment_sum.cpu import bag_gradients_native, segment_sum_native
from jaxsparse.ops.segment_sum.gpu import bag_gradients_triton, segment_sum_triton
from jaxsparse.ops.segment_sum.grouped import bag_gradients_xla, segment_sum_xla
from jaxsparse.ops.segment_sum.levels import FAN_IN, level_sizes, plan_levels
from jaxsparse.ops.segment_sum.xla import sum_levels
from jaxsparse.ops.shapes import Shapes

__all__ = [
    "FAN_IN",
    "BagGradients",
    "bag_gradients",
    "level_sizes",
    "plan_levels",
    "segment_sum",
    "sum_levels",
]


def segment_sum(
    values: jax.Array,
    offsets: jax.Array,
    order: jax.Array | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Sums rows by group: row k is the sum of ``values[order[j]]`` over entries j of group k.

    Args:
        values: ``[N, D]`` float32.
        offsets: ``[K + 1]`` int32 ascending: entries ``offsets[k]`` to ``offsets[k + 1]`` are
            group k.
        order: ``[M]`` int32 row of each entry, grouped; one out of range adds nothing. None where
            entry j is row j.
        implementation: ``xla``, ``native`` or ``triton``; None for the best.

    Returns:
        ``[K, D]`` float32.

    Raises:
        ValueError: shapes or dtypes are others, or there is no such implementation.
        RuntimeError: the native one is asked for and is not there.

    >>> values = jnp.array([[1.0], [2.0], [4.0]])
    >>> segment_sum(values, jnp.array([0, 2, 3]), jnp.array([2, 0, 1])).tolist()
    [[5.0], [2.0]]
    """
    kernels = {
        "xla": segment_sum_xla,
        "native": derived_from(segment_sum_xla, segment_sum_native),
        "triton": derived_from(segment_sum_xla, segment_sum_triton),
    }
    args = jax.tree.map(jnp.asarray, (values, offsets, order))
    shapes = Shapes("segment_sum")
    shapes.check("values", args[0], "N, D", jnp.float32)
    shapes.check("offsets", args[1], "K + 1", jnp.int32)
    shapes.check("order", args[2], "M", jnp.int32)
    sums: jax.Array = run_on_platform("segment_sum", implementation, kernels, *args)
    return sums


def bag_gradients(
    grads: tuple[jax.Array, ...],
    offsets: jax.Array,
    bags: jax.Array,
    ids: jax.Array | None = None,
    weights: jax.Array | None = None,
    scale: jax.Array | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """The transpose of `embedding_bag`: gradients of bags, summed by distinct row.

    Group k is entries ``offsets[k]`` to ``offsets[k + 1]`` of ``bags``, one an id; it sums
    ``weights[ids[j]] * scale[bags[j]] * grads[bags[j]]``.

    Args:
        grads: arrays ``[parts_f, D]`` float32, which together are ``[O, D]``: gradients of bags.
        offsets: ``[K + 1]`` int32 ascending.
        bags: ``[M]`` int32 bag of each entry; one out of range adds nothing.
        ids: ``[M]`` int32 id of each entry, where there are weights.
        weights: float32 by id; None means 1.
        scale: ``[O]`` float32 by bag; None means 1.
        implementation: ``xla``, ``native`` or ``triton``; None for the best.

    Returns:
        ``[K, D]`` float32.

    Raises:
        ValueError: shapes or dtypes are others, weights come without ids, or there is no such
            implementation.
        RuntimeError: the native one is asked for and is not there.

    >>> grads = (jnp.array([[1.0]]), jnp.array([[2.0], [4.0]]))
    >>> bag_gradients(grads, jnp.array([0, 2, 3]), jnp.array([0, 2, 1])).tolist()
    [[5.0], [2.0]]
    """
    kernels = {
        "xla": bag_gradients_xla,
        "native": derived_from(bag_gradients_xla, bag_gradients_native),
        "triton": derived_from(bag_gradients_xla, bag_gradients_triton),
    }
    args = jax.tree.map(jnp.asarray, (tuple(grads), offsets, bags, ids, weights, scale))
    BagGradients(*args).check()
    sums: jax.Array = run_on_platform("bag_gradients", implementation, kernels, *args)
    return sums


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("grads", "offsets", "bags", "ids", "weights", "scale"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class BagGradients:
    """The arguments of `bag_gradients`: sums that are not made yet."""

    grads: tuple[jax.Array, ...]
    offsets: jax.Array
    bags: jax.Array
    ids: jax.Array | None = None
    weights: jax.Array | None = None
    scale: jax.Array | None = None

    def sum(self, implementation: str | None = None) -> jax.Array:
        """``[K, D]`` float32."""
        by_bag = self.grads, self.offsets, self.bags, self.ids, self.weights, self.scale
        return bag_gradients(*by_bag, implementation=implementation)

    @property
    def shape(self) -> tuple[int, int]:
        """``(K, D)`` of the sums."""
        return self.offsets.shape[0] - 1, self.grads[0].shape[1]

    @property
    def dtype(self) -> np.dtype[np.float32]:
        """Of the sums."""
        return np.dtype(np.float32)

    def check(self) -> None:
        """Raises ValueError where the arrays do not fit together."""
        if self.weights is not None and self.ids is None:
            raise ValueError("bag_gradients: weights are by id, so they need ids")
        if not self.grads:
            raise ValueError("bag_gradients: grads is empty, expected at least one array")
        shapes = Shapes("bag_gradients")
        for number, part in enumerate(self.grads):
            shapes.check(f"grads[{number}]", part, "_, D", jnp.float32)
        shapes.sizes["O"] = sum(part.shape[0] for part in self.grads)
        shapes.check("offsets", self.offsets, "K + 1", jnp.int32)
        shapes.check("bags", self.bags, "M", jnp.int32)
        shapes.check("ids", self.ids, "M", jnp.int32)
        shapes.check("weights", self.weights, "_", jnp.float32)
        shapes.check("scale", self.scale, "O", jnp.float32)
