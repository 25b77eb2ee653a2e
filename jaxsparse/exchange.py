# SPDX-License-Identifier: Apache-2.0
"""Device side of the exchange: rows out to those who ask, gradients back to those who own.

All functions run on per-device blocks inside a ``shard_map`` over every axis of the mesh. A routed
slab travels by all-to-all; a replicated one is read where it is, and its row gradients are
gathered so that every device makes the same update.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Route:
    """How one slab is reached from a device."""

    axes: tuple[str, ...]
    """Mesh axes, flattened in order."""
    num_devices: int
    replicated: bool
    num_rows: int
    """R: rows of the slab on each device; also the address that means "no row"."""
    wire_dtype: Any = None

    def fetch(self, slab: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Reads the rows this device asks of each owner.

        Args:
            slab: ``[R, D]``, this device's part.
            rows: ``[S * C]`` int32 local rows, grouped by owner, padded with R.

        Returns:
            The rows asked of this device ``[S * C]``, and the vectors it asked for
            ``[S * C, D]`` float32 (zeros for padding).
        """
        asked = rows if self._local else self._all_to_all(rows)
        vectors = slab.at[asked].get(mode="fill", fill_value=0)
        if self._local:
            return asked, vectors.astype(jnp.float32)
        return asked, self._all_to_all(self._to_wire(vectors)).astype(jnp.float32)

    def give_back(self, asked: jax.Array, grads: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Brings row gradients to the owners and sums them by row.

        Args:
            asked: ``[S * C]``, from `fetch`.
            grads: ``[S * C, D]`` float32, gradients of the rows this device asked for.

        Returns:
            Distinct local rows ``[K]`` ascending, padded with R, and their gradients ``[K, D]``.
        """
        if self.num_devices == 1:
            return asked, grads
        if self.replicated:
            asked = lax.all_gather(asked, self.axes, tiled=True)
            grads = lax.all_gather(self._to_wire(grads), self.axes, tiled=True)
        else:
            grads = self._all_to_all(self._to_wire(grads))
        return merge_rows(asked, grads.astype(jnp.float32), self.num_rows)

    @property
    def _local(self) -> bool:
        return self.replicated or self.num_devices == 1

    def _all_to_all(self, x: jax.Array) -> jax.Array:
        result: jax.Array = lax.all_to_all(x, self.axes, split_axis=0, concat_axis=0, tiled=True)
        return result

    def _to_wire(self, x: jax.Array) -> jax.Array:
        return x if self.wire_dtype is None else x.astype(self.wire_dtype)


def merge_rows(rows: jax.Array, grads: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Sums gradients of equal rows, in the order given.

    A row occurs at most once per source, so the sums are short.

    Args:
        rows: ``[K]`` int32, padded with ``num_rows``.
        grads: ``[K, D]`` float32.
        num_rows: R.

    Returns:
        Distinct rows ``[K]`` ascending, padded with ``num_rows``, and summed gradients ``[K, D]``.
    """
    size = rows.shape[0]
    ordered, order = lax.sort((rows, lax.iota(jnp.int32, size)), num_keys=1, is_stable=True)
    is_head = jnp.concatenate([jnp.ones(min(size, 1), bool), ordered[1:] != ordered[:-1]])
    segment_of_ordered = jnp.cumsum(is_head.astype(jnp.int32)) - 1
    distinct = jnp.full(size, num_rows, jnp.int32).at[segment_of_ordered].set(ordered)
    segment_of_ordered = jnp.where(ordered == num_rows, size, segment_of_ordered)
    segment = jnp.zeros(size, jnp.int32).at[order].set(segment_of_ordered, unique_indices=True)
    return distinct, jnp.zeros_like(grads).at[segment].add(grads, mode="drop")
