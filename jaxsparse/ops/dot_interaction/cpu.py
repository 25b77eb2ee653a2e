# SPDX-License-Identifier: Apache-2.0
"""Pairwise dots on the CPU, in C++, straight from the separate arrays."""

from __future__ import annotations

import jax

HANDLERS = ("jaxsparse_dot_interaction", "jaxsparse_dot_interaction_grad")


def dot_interaction_native(vectors: tuple[jax.Array, ...]) -> jax.Array:
    """`dot_interaction` of float32 vectors of one shape; the library is loaded."""
    count, (num_samples, _) = len(vectors), vectors[0].shape
    shape = jax.ShapeDtypeStruct((num_samples, count * (count - 1) // 2), vectors[0].dtype)
    dots: jax.Array = jax.ffi.ffi_call(HANDLERS[0], shape, vmap_method="sequential")(*vectors)
    return dots


def dot_interaction_grads_native(
    grads: jax.Array, vectors: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Gradients of the vectors from those ``[b, F * (F - 1) / 2]`` of the dots."""
    shapes = [jax.ShapeDtypeStruct(vector.shape, vector.dtype) for vector in vectors]
    return tuple(jax.ffi.ffi_call(HANDLERS[1], shapes, vmap_method="sequential")(grads, *vectors))
