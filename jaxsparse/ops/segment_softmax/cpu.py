# SPDX-License-Identifier: Apache-2.0
"""Softmax within segments on the CPU, in C++."""

from __future__ import annotations

import jax

HANDLERS = ("jaxsparse_segment_softmax", "jaxsparse_segment_softmax_grad")


def segment_softmax_native(scores: jax.Array, offsets: jax.Array) -> jax.Array:
    """`segment_softmax` of float32 scores and int32 offsets; the library is loaded."""
    shape = jax.ShapeDtypeStruct(scores.shape, scores.dtype)
    shares: jax.Array = jax.ffi.ffi_call(HANDLERS[0], shape, vmap_method="sequential")(
        scores, offsets
    )
    return shares


def segment_softmax_grads_native(
    grads: jax.Array, shares: jax.Array, offsets: jax.Array
) -> jax.Array:
    """Gradient ``[N]`` of the scores from that of the result ``shares [N]``."""
    shape = jax.ShapeDtypeStruct(shares.shape, shares.dtype)
    found: jax.Array = jax.ffi.ffi_call(HANDLERS[1], shape, vmap_method="sequential")(
        grads, shares, offsets
    )
    return found
