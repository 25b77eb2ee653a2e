# SPDX-License-Identifier: Apache-2.0
"""`unique` on any XLA backend: one sort of int32 pairs and two scatters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def unique_xla(rows: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Groups equal rows; see `jaxsparse.ops.unique.unique`."""
    size = rows.shape[0]
    places = lax.iota(jnp.int32, size)
    rows = jnp.where((rows >= 0) & (rows < num_rows), rows, num_rows)
    ordered, order = lax.sort((rows, places), num_keys=1, is_stable=True)
    is_first = jnp.concatenate([jnp.ones(min(size, 1), bool), ordered[1:] != ordered[:-1]])
    is_first = is_first & (ordered < num_rows)
    group = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    # Only the first of each group writes; the others go past the end.
    target = jnp.where(is_first, group, size + 1)
    distinct = jnp.full(size, num_rows, jnp.int32)
    distinct = distinct.at[target].set(ordered, mode="drop", unique_indices=False)
    num_real = jnp.sum(rows < num_rows, dtype=jnp.int32)
    offsets = jnp.full(size + 1, 0, jnp.int32) + num_real
    return distinct, order, offsets.at[target].set(places, mode="drop", unique_indices=False)
