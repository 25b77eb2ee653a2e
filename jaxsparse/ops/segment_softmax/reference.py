# SPDX-License-Identifier: Apache-2.0
"""What `segment_softmax` means."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def segment_softmax_reference(scores: jax.Array, offsets: jax.Array) -> jax.Array:
    """Softmax of each segment, all of them as rows of a dense mask.

    Args:
        scores: ``[N]`` floating.
        offsets: ``[B + 1]`` int32; segment b is ``offsets[b] .. offsets[b + 1]``.

    Returns:
        ``[N]``; 0 outside all segments, and where all scores of a segment are -inf.
    """
    places = jnp.arange(scores.shape[0], dtype=offsets.dtype)[None]
    member = (places >= offsets[:-1, None]) & (places < offsets[1:, None])
    member &= scores[None] != -jnp.inf
    largest = jnp.where(member, scores[None], -jnp.inf).max(axis=1, keepdims=True, initial=-jnp.inf)
    largest = jax.lax.stop_gradient(jnp.where(largest == -jnp.inf, 0, largest))
    powers = jnp.where(member, jnp.exp(jnp.where(member, scores[None] - largest, 0)), 0)
    totals = powers.sum(axis=1, keepdims=True)
    shares = powers / jnp.where(totals == 0, 1, totals)
    return shares.sum(axis=0)
