# SPDX-License-Identifier: Apache-2.0
"""What `segment_sum` means."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def segment_sum_reference(values: jax.Array, segments: jax.Array, num_segments: int) -> jax.Array:
    """Sums ``values [N, D]`` whose segment is s into row s; other segments are left out.

    Args:
        values: ``[N, D]`` float32.
        segments: ``[N]`` int32; values outside ``[0, num_segments)`` add nowhere.
        num_segments: number of rows of the result.

    Returns:
        ``[num_segments, D]`` float32.
    """
    member = segments[None, :] == jnp.arange(num_segments, dtype=segments.dtype)[:, None]
    return jnp.where(member[:, :, None], values[None], 0).sum(axis=1)
