# SPDX-License-Identifier: Apache-2.0
"""Softmax within ragged segments: the weights of attention pooling."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxsparse.ops.platforms import Implementation, run_on_platform
from jaxsparse.ops.segment_softmax.cpu import (
    segment_softmax_grads_native,
    segment_softmax_native,
)
from jaxsparse.ops.segment_softmax.xla import segment_softmax_grads_xla, segment_softmax_xla

__all__ = ["segment_softmax"]

_SHARES: dict[str, Implementation] = {
    "xla": segment_softmax_xla,
    "native": segment_softmax_native,
}
_GRADS: dict[str, Implementation] = {
    "xla": segment_softmax_grads_xla,
    "native": segment_softmax_grads_native,
}


def segment_softmax(
    scores: jax.Array, offsets: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """Softmax within segments of one buffer.

    The first derivative has kernels; further ones in reverse mode are XLA's. ::

        scores    s0 s1 | s2 | s3 s4 s5 | padding
        offsets   0       2    3          6

    Args:
        scores: ``[N]`` float32; -inf gets nothing.
        offsets: ``[B + 1]`` int32, ascending: segment b is ``offsets[b] .. offsets[b + 1]``.
        implementation: ``xla`` or ``native``; None for the best.

    Returns:
        ``[N]`` float32 that sum to 1 in each segment; 0 outside all segments, and where all scores
        of a segment are -inf.

    Raises:
        ValueError: shapes or dtypes are others, or there is no such implementation.
        RuntimeError: the native one is asked for and is not there.

    >>> scores = jnp.array([1.0, 1.0, 5.0, 9.0])
    >>> segment_softmax(scores, jnp.array([0, 2, 2, 3])).tolist()
    [0.5, 0.5, 1.0, 0.0]
    """
    scores, offsets = jnp.asarray(scores), jnp.asarray(offsets)
    if scores.ndim != 1 or scores.dtype != jnp.float32:
        raise ValueError(
            f"segment_softmax: scores must be float32 [N], got {scores.dtype} {list(scores.shape)}"
        )
    if offsets.ndim != 1 or offsets.dtype != jnp.int32 or not offsets.size:
        raise ValueError(
            "segment_softmax: offsets must be int32 [B + 1], got "
            f"{offsets.dtype} {list(offsets.shape)}"
        )
    if scores.size == 0 or offsets.size == 1:
        return jnp.zeros_like(scores)
    return _shares(implementation, scores, offsets)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shares(implementation: str | None, scores: jax.Array, offsets: jax.Array) -> jax.Array:
    found: jax.Array = run_on_platform("segment_softmax", implementation, _SHARES, scores, offsets)
    return found


Saved = tuple[jax.Array, jax.Array]


def _shares_forward(
    implementation: str | None, scores: jax.Array, offsets: jax.Array
) -> tuple[jax.Array, Saved]:
    shares = _shares(implementation, scores, offsets)
    return shares, (shares, offsets)


def _shares_backward(
    implementation: str | None, saved: Saved, grads: jax.Array
) -> tuple[jax.Array, None]:
    return _grads(implementation, grads, *saved), None


_shares.defvjp(_shares_forward, _shares_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grads(
    implementation: str | None, grads: jax.Array, shares: jax.Array, offsets: jax.Array
) -> jax.Array:
    found: jax.Array = run_on_platform(
        "segment_softmax", implementation, _GRADS, grads, shares, offsets
    )
    return found


def _grads_forward(
    implementation: str | None, grads: jax.Array, shares: jax.Array, offsets: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return _grads(implementation, grads, shares, offsets), (grads, shares, offsets)


def _grads_backward(
    implementation: str | None, saved: tuple[jax.Array, jax.Array, jax.Array], seeds: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    """Second derivatives: rare, so XLA's."""
    del implementation
    grads, shares, offsets = saved
    _, pull_back = jax.vjp(partial(segment_softmax_grads_xla, offsets=offsets), grads, shares)
    of_grads, of_shares = pull_back(seeds)
    return of_grads, of_shares, None


_grads.defvjp(_grads_forward, _grads_backward)
