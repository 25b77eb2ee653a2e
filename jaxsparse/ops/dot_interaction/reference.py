# SPDX-License-Identifier: Apache-2.0
"""What `dot_interaction` means."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def dot_interaction_reference(vectors: Sequence[jax.Array]) -> jax.Array:
    """Dots of vector f with each vector g before it, pair by pair.

    Args:
        vectors: F arrays ``[b, D]``.

    Returns:
        ``[b, F * (F - 1) / 2]``: pairs (1, 0), (2, 0), (2, 1), (3, 0), ...
    """
    dots = [(vectors[f] * vectors[g]).sum(axis=1) for f in range(len(vectors)) for g in range(f)]
    return jnp.stack(dots, axis=1) if dots else jnp.zeros((vectors[0].shape[0], 0))
