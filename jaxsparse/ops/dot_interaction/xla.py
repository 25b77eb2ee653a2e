# SPDX-License-Identifier: Apache-2.0
"""Pairwise dots on any XLA backend: a batched matrix product, of which half is read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def dot_interaction_xla(vectors: tuple[jax.Array, ...]) -> jax.Array:
    """`dot_interaction` of vectors of one shape and floating dtype."""
    return _pairwise_dots(jnp.stack(vectors, axis=1))


def dot_interaction_grads_xla(
    grads: jax.Array, vectors: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Gradients of the vectors from those ``[b, F * (F - 1) / 2]`` of the dots."""
    _, pull_back = jax.vjp(dot_interaction_xla, vectors)
    (found,) = pull_back(grads)
    return tuple(found)


def _pairwise_dots(vectors: jax.Array) -> jax.Array:
    num_samples, num_vectors, _ = vectors.shape
    row, column = np.tril_indices(num_vectors, -1)
    dots = jnp.einsum("bfd,bgd->bfg", vectors, vectors).reshape(num_samples, num_vectors**2)
    # The promises spare the backward pass a scatter that expects collisions.
    return dots.at[:, row * num_vectors + column].get(
        unique_indices=True, indices_are_sorted=True, mode="promise_in_bounds"
    )
