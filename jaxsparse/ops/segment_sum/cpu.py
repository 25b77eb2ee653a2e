# SPDX-License-Identifier: Apache-2.0
"""Sums by group on the CPU, in C++."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.ops.native.arguments import or_empty, presence

HANDLERS = ("jaxsparse_bag_gradients",)


def bag_gradients_native(
    grads: tuple[jax.Array, ...],
    offsets: jax.Array,
    bags: jax.Array | None,
    ids: jax.Array | None,
    weights: jax.Array | None,
    scale: jax.Array | None,
) -> jax.Array:
    """`bag_gradients` by the kernel; ``bags=None`` means that entry j is bag j."""
    shape = jax.ShapeDtypeStruct((offsets.shape[0] - 1, grads[0].shape[1]), jnp.float32)
    sums: jax.Array = jax.ffi.ffi_call(HANDLERS[0], shape, vmap_method="sequential")(
        offsets,
        or_empty(bags, np.int32),
        or_empty(ids, np.int32),
        or_empty(weights, np.float32),
        or_empty(scale, np.float32),
        *grads,
        present=presence(bags, weights, scale),
    )
    return sums


def segment_sum_native(values: jax.Array, offsets: jax.Array, order: jax.Array | None) -> jax.Array:
    """`segment_sum` by the same kernel."""
    return bag_gradients_native((values,), offsets, order, None, None, None)
