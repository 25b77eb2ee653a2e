# SPDX-License-Identifier: Apache-2.0
"""What differs between the tables of one slab: learning rate, and what rounding depends on."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.tree_util.register_dataclass, data_fields=("starts", "rates", "noise"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class RowTables:
    """The tables of a slab's rows on one device, T of them.

    >>> tables = RowTables(jnp.array([0, 4]), jnp.array([0.5, 0.25]), jnp.array([7, 0], "uint32"))
    >>> rates, noise_rows = tables.of(jnp.array([3, 4]))
    >>> rates.tolist(), noise_rows.tolist()
    ([0.5, 0.25], [10, 4])
    """

    starts: jax.Array
    """``[T]`` int32 ascending: a row is of the last table that does not start behind it."""
    rates: jax.Array
    """``[T]`` float32 learning rates."""
    noise: jax.Array
    """``[T]`` uint32, added to a row (modulo 2^32): the sum is what its rounding depends on."""

    def of(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Learning rate ``[K]`` and noise row ``[K]`` uint32 of rows ``[K]``."""
        if self.starts.shape[0] == 1:
            rates = jnp.full(rows.shape, self.rates[0])
            return rates, rows.astype(jnp.uint32) + self.noise
        place = jnp.searchsorted(self.starts, rows, side="right", method="scan_unrolled") - 1
        place = jnp.maximum(place, 0)
        return self.rates[place], rows.astype(jnp.uint32) + self.noise[place]
