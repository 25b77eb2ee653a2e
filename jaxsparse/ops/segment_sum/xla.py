# SPDX-License-Identifier: Apache-2.0
"""Sums along planned levels, on any XLA backend: one scatter-add a level."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def sum_levels(values: jax.Array, levels: Sequence[jax.Array], num_segments: int) -> jax.Array:
    """Sums rows by segment, along destinations made by `plan_levels`.

    Args:
        values: ``[N, D]`` float32.
        levels: int32 destinations, level by level; ``levels[0]`` is ``[N]``.
        num_segments: number of rows of the result.

    Returns:
        ``[num_segments, D]`` float32.
    """
    overflow_rows = sum(level.shape[0] for level in levels[1:])
    sums = jnp.zeros((num_segments + overflow_rows, values.shape[1]), values.dtype)
    sums = sums.at[levels[0]].add(values, mode="drop")
    start = num_segments
    for level in levels[1:]:
        chunk_sums = sums[start : start + level.shape[0]]
        sums = sums.at[level].add(chunk_sums, mode="drop")
        start += level.shape[0]
    return sums[:num_segments]
