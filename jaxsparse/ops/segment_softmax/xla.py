# SPDX-License-Identifier: Apache-2.0
"""`segment_softmax` on any XLA backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def segment_softmax_xla(scores: jax.Array, offsets: jax.Array) -> jax.Array:
    """`segment_softmax` of at least one score and one segment, of the right dtypes."""
    ends, segments = _segments(offsets, scores.shape[0])
    inside = segments < ends.shape[0]
    largest = jnp.full(ends.shape, -jnp.inf, scores.dtype).at[segments].max(scores, mode="drop")
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    powers = jnp.where(inside, jnp.exp(scores - largest.at[segments].get(mode="clip")), 0)
    totals = _totals(powers, ends, segments)
    return jnp.where(totals == 0, 0, powers / jnp.where(totals == 0, 1, totals))


def segment_softmax_grads_xla(grads: jax.Array, shares: jax.Array, offsets: jax.Array) -> jax.Array:
    """Gradient ``[N]`` of the scores from that of the result ``shares [N]``."""
    ends, segments = _segments(offsets, shares.shape[0])
    counts = shares != 0
    totals = _totals(jnp.where(counts, shares * grads, 0), ends, segments)
    return jnp.where(counts, shares * (grads - totals), 0)


def _segments(offsets: jax.Array, num_scores: int) -> tuple[jax.Array, jax.Array]:
    """Ends ``[B]`` of the segments, and the segment ``[N]`` of each place, B outside all."""
    inside = jnp.clip(offsets, 0, num_scores)
    # A place lies behind as many ends as there are segments before its own.
    ended = jnp.zeros(num_scores + 1, jnp.int32).at[inside[1:]].add(1)
    segments = jnp.cumsum(ended)[:num_scores]
    first = lax.iota(jnp.int32, num_scores) >= inside[0]
    return inside[1:], jnp.where(first, segments, offsets.shape[0] - 1)


def _totals(values: jax.Array, ends: jax.Array, segments: jax.Array) -> jax.Array:
    """``[N]`` sum of each place's segment, 0 outside all.

    Added in a tree: a scatter would lose digits of long segments, and on a GPU its order changes.
    """
    begins = jnp.concatenate([jnp.ones(1, bool), segments[1:] != segments[:-1]])
    running, _ = lax.associative_scan(_join, (values, begins))
    totals: jax.Array = running[jnp.maximum(ends - 1, 0)]
    return totals.at[segments].get(mode="fill", fill_value=0)


def _join(
    before: tuple[jax.Array, jax.Array], after: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Sums of two neighbouring stretches, each since the last begin within it."""
    sums = jnp.where(after[1], after[0], before[0] + after[0])
    return sums, before[1] | after[1]
