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

from jaxsparse.ops.paths import Path
from jaxsparse.ops.row_update import XLA_ROWS, RowAccess
from jaxsparse.ops.segment_sum import BagGradients, segment_sum
from jaxsparse.ops.unique import unique

Gradients = tuple[jax.Array, jax.Array | BagGradients]
"""Distinct local rows ``[K]`` int32, and their gradients ``[K, D]`` float32."""


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
    path: Path = "xla"
    """Which kernels merge rows."""
    access: RowAccess = XLA_ROWS
    """How rows are read."""

    @property
    def is_local(self) -> bool:
        """Whether every row is read where it is."""
        return self.replicated or self.num_devices == 1

    def ask(self, rows: jax.Array) -> jax.Array:
        """Tells each owner which rows this device wants.

        Args:
            rows: ``[S * C]`` int32 local rows, grouped by owner, padded with R.

        Returns:
            ``[S * C]`` the rows asked of this device.
        """
        return rows if self.is_local else self._all_to_all(rows)

    def answer(self, slab: jax.Array, asked: jax.Array) -> jax.Array:
        """Reads the rows asked of this device and brings each device those it wants.

        Args:
            slab: ``[R, D]``, this device's part.
            asked: from `ask`.

        Returns:
            The vectors this device asked for, ``[S * C, D]`` float32 (zeros for padding).
        """
        vectors = self.access.read(slab, asked)
        if not self.is_local:
            vectors = self._all_to_all(self._to_wire(vectors))
        return vectors.astype(jnp.float32)

    def give_back(self, asked: jax.Array, grads: jax.Array | BagGradients) -> Gradients:
        """Brings row gradients to the owners and sums them by row.

        Args:
            asked: ``[S * C]``, from `ask`.
            grads: ``[S * C, D]`` float32, gradients of the rows this device asked for; sums that
                are to be made are made if they travel.

        Returns:
            Distinct local rows ``[K]`` ascending, padded with R, and their gradients ``[K, D]``.
        """
        if self.num_devices == 1:
            return asked, grads
        sums = grads.sum(self.path) if isinstance(grads, BagGradients) else grads
        if self.replicated:
            asked = lax.all_gather(asked, self.axes, tiled=True)
            sums = lax.all_gather(self._to_wire(sums), self.axes, tiled=True)
        else:
            sums = self._all_to_all(self._to_wire(sums))
        return merge_rows(asked, sums.astype(jnp.float32), self.num_rows, self.path)

    def _all_to_all(self, x: jax.Array) -> jax.Array:
        result: jax.Array = lax.all_to_all(x, self.axes, split_axis=0, concat_axis=0, tiled=True)
        return result

    def _to_wire(self, x: jax.Array) -> jax.Array:
        return x if self.wire_dtype is None else x.astype(self.wire_dtype)


def merge_rows(
    rows: jax.Array, grads: jax.Array, num_rows: int, path: Path
) -> tuple[jax.Array, jax.Array]:
    """Sums gradients of equal rows, in the order given.

    A row occurs at most once per source, so the sums are short.

    Args:
        rows: ``[K]`` int32, padded with ``num_rows``.
        grads: ``[K, D]`` float32.
        num_rows: R.
        path: which kernels.

    Returns:
        Distinct rows ``[K]`` ascending, padded with ``num_rows``, and summed gradients ``[K, D]``.
    """
    if path == "xla":
        return _merge_by_scatter(rows, grads, num_rows)
    distinct, order, offsets = unique(rows, num_rows, implementation=path)
    return distinct, segment_sum(grads, offsets, order, implementation=path)


def _merge_by_scatter(
    rows: jax.Array, grads: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Sums need no levels here: they are as short as there are devices."""
    size = rows.shape[0]
    ordered, order = lax.sort((rows, lax.iota(jnp.int32, size)), num_keys=1, is_stable=True)
    is_head = jnp.concatenate([jnp.ones(min(size, 1), bool), ordered[1:] != ordered[:-1]])
    segment_of_ordered = jnp.cumsum(is_head.astype(jnp.int32)) - 1
    distinct = jnp.full(size, num_rows, jnp.int32).at[segment_of_ordered].set(ordered)
    segment_of_ordered = jnp.where(ordered == num_rows, size, segment_of_ordered)
    segment = jnp.zeros(size, jnp.int32).at[order].set(segment_of_ordered, unique_indices=True)
    return distinct, jnp.zeros_like(grads).at[segment].add(grads, mode="drop")
