# SPDX-License-Identifier: Apache-2.0
"""`unique` on a GPU: XLA's sort of int32 pairs, then two passes over the sorted rows.

XLA alone makes nine programs of what follows the sort: five for the running sum, four for the two
scatters. Here one kernel counts the groups that begin in each part of the rows, and one writes
them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxsparse.ops.triton import Ref, launch, load_at, store_at

PART = 1024
"""Rows a program looks at."""


def unique_triton(
    rows: jax.Array, num_rows: int, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Groups equal rows; see `jaxsparse.ops.unique.unique`.

    Args:
        rows: ``[N]`` int32.
        num_rows: R.
        interpret: True runs without a GPU.

    Returns:
        ``distinct [N]``, ``order [N]``, ``offsets [N + 1]``, all int32.
    """
    size = rows.shape[0]
    if size == 0:
        return rows, rows, jnp.zeros(1, jnp.int32)
    rows = jnp.where((rows >= 0) & (rows < num_rows), rows, num_rows)
    ordered, order = lax.sort((rows, lax.iota(jnp.int32, size)), num_keys=1, is_stable=True)
    parts = _Parts(size, num_rows)
    counts = launch(
        parts.count,
        ordered,
        name="unique_count",
        out_shape=(_int32s(parts.num_programs),) * 2,
        num_programs=parts.num_programs,
        interpret=interpret,
    )
    distinct, offsets = launch(
        parts.write,
        ordered,
        counts,
        name="unique_write",
        out_shape=(_int32s(size), _int32s(size + 1)),
        num_programs=parts.num_programs,
        interpret=interpret,
    )
    return distinct, order, offsets


def _int32s(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), jnp.int32)


class _Parts:
    """Kernels on sorted rows ``[N]``, cut into parts."""

    def __init__(self, size: int, num_rows: int):
        self.size = size
        self.num_rows = num_rows
        # One place more than there are rows, for the last of the offsets.
        self.num_programs = -(-(size + 1) // PART)

    def count(self, ordered: Ref, firsts: Ref, grouped: Ref) -> None:
        """Writes how many groups begin in a part, and how many of its rows are in any."""
        _, rows, is_first = self._part(ordered)
        program = pl.program_id(0)
        firsts[program] = jnp.sum(is_first.astype(jnp.int32), dtype=jnp.int32)
        grouped[program] = jnp.sum((rows < self.num_rows).astype(jnp.int32), dtype=jnp.int32)

    def write(self, ordered: Ref, counts: tuple[Ref, Ref], distinct: Ref, offsets: Ref) -> None:
        """Writes the groups that begin in a part, and what is written where there is no group."""
        program = pl.program_id(0)
        at, rows, is_first = self._part(ordered)

        def add(
            index: jax.Array, sums: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            part = index * PART + jnp.arange(PART, dtype=jnp.int32)
            firsts, grouped = (load_at(ref, part, part < self.num_programs) for ref in counts)
            before = jnp.where(part < program, firsts, 0)
            return (sums[0] + before, sums[1] + firsts, sums[2] + grouped)

        zeros = (jnp.zeros(PART, jnp.int32),) * 3
        sums = lax.fori_loop(0, -(-self.num_programs // PART), add, zeros)
        before, num_groups, num_grouped = (jnp.sum(part, dtype=jnp.int32) for part in sums)
        group = before - 1 + jnp.cumsum(is_first.astype(jnp.int32), dtype=jnp.int32)
        store_at(distinct, group, is_first, rows)
        store_at(offsets, group, is_first, at)
        is_rest = at >= num_groups
        rest = jnp.full_like(at, self.num_rows), jnp.zeros_like(at) + num_grouped
        store_at(distinct, at, is_rest & (at < self.size), rest[0])
        store_at(offsets, at, is_rest & (at <= self.size), rest[1])

    def _part(self, ordered: Ref) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Places ``[PART]``, their rows, and whether each is the first of a group."""
        at = pl.program_id(0) * PART + jnp.arange(PART, dtype=jnp.int32)
        inside = at < self.size
        rows = load_at(ordered, at, inside, self.num_rows)
        previous = load_at(ordered, at - 1, inside & (at > 0), -1)
        return at, rows, (rows < self.num_rows) & (rows != previous)
