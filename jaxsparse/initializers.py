# SPDX-License-Identifier: Apache-2.0
"""Initial values of embedding rows: small frozen callables, one row at a time.

A row is drawn from a key of its own (derived from the collection's key, the table's name and the
row's position), so that the values do not depend on the mesh or on how the draw is split.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp


class Initializer(Protocol):
    """Anything called as ``initializer(key, shape, dtype)``; must be hashable.

    ``jax.nn.initializers`` that accept a one-dimensional shape qualify.
    """

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Draws one row: ``shape`` is ``(embedding_dim,)``."""
        ...


@dataclasses.dataclass(frozen=True)
class uniform:
    """Uniform values in [-scale, scale)."""

    scale: float = 0.05
    """Half the width of the interval."""

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Draws ``shape`` values."""
        draw = jax.random.uniform(key, shape, jnp.float32, -self.scale, self.scale)
        return draw.astype(dtype)


@dataclasses.dataclass(frozen=True)
class normal:
    """Normal values with mean 0."""

    stddev: float = 0.01
    """Standard deviation."""

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Draws ``shape`` values."""
        return (self.stddev * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


@dataclasses.dataclass(frozen=True)
class constant:
    """The same value everywhere."""

    value: float = 0.0
    """The value."""

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Fills ``shape``; the key is not used."""
        del key
        return jnp.full(shape, self.value, dtype)
