# SPDX-License-Identifier: Apache-2.0
"""What is to become of touched rows: decided, and not yet written.

Between the two a step finds out whether it is finite; one that is not writes nothing.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxsparse.ops.paths import Path
from jaxsparse.ops.row_update import MovedRows, RowTables, count_not_finite, row_update
from jaxsparse.ops.segment_sum import BagGradients
from jaxsparse.optimizers import Slots, SparseOptimizer

if TYPE_CHECKING:
    from jaxsparse.embedding import EmbeddingCollection

ROUNDING_SEED = 0
"""Seed of the rounding of bfloat16 rows: tables and steps differ as it is (`row_tables`)."""


@dataclasses.dataclass(frozen=True)
class FusedMoves:
    """An update whose rule is part of the kernel: what it would read, nothing yet computed."""

    rule: SparseOptimizer
    slab: jax.Array
    """``[R, D]``, before the update."""
    slots: Slots
    rows: jax.Array
    """``[K]`` int32 distinct local rows, padded with R."""
    grads: jax.Array | BagGradients
    """``[K, D]`` float32; not yet summed where nobody asks before the update is made."""
    tables: RowTables
    step: jax.Array
    path: Path

    def num_not_finite(self, num_rows: int) -> jax.Array:
        """Rows that it would leave with a NaN or infinity; int32 scalar."""
        del num_rows  # as many as the slab has
        grads = self.grads.sum(self.path) if isinstance(self.grads, BagGradients) else self.grads
        inputs = self.rows, grads, self.tables, self.step
        return count_not_finite(self.rule, self.slab, self.slots, *inputs, **self._how)

    def put(self, slab: jax.Array, slots: Slots, enabled: jax.Array) -> tuple[jax.Array, Slots]:
        """Makes the update in place."""
        inputs = self.rows, self.grads, self.tables, self.step
        return row_update(self.rule, slab, slots, *inputs, enabled, **self._how)

    @property
    def _how(self) -> dict[str, Any]:
        return {"seed": ROUNDING_SEED, "implementation": self.path}


Moves = MovedRows | FusedMoves
"""What is to become of one slab's touched rows; per-device blocks."""


def num_not_finite(moves: tuple[Moves, ...], emb: EmbeddingCollection) -> jax.Array:
    """Touched rows of this device that a rule has moved to NaN or infinity; int32 scalar."""
    total = jnp.int32(0)
    slabs = [slab for slab in emb.layout.slabs if slab.trainable]
    for move, slab in zip(moves, slabs, strict=True):
        total += move.num_not_finite(slab.rows_per_shard)
    return jnp.asarray(total)
