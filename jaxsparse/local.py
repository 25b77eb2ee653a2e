# SPDX-License-Identifier: Apache-2.0
"""The embedding layer on per-device blocks: what runs inside a ``shard_map`` over the mesh."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jaxsparse.exchange import Route
from jaxsparse.layout import SlabLayout
from jaxsparse.optimizers import Slots
from jaxsparse.packed import PackedIds
from jaxsparse.pooling import Activations, pool, row_gradients, weight_gradients
from jaxsparse.row_grads import RowGrads
from jaxsparse.state import EmbeddingState, row_rates

if TYPE_CHECKING:
    from jaxsparse.embedding import EmbeddingCollection


@partial(jax.tree_util.register_dataclass, data_fields=("ids", "asked", "vectors"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Residuals:
    """What `lookup` keeps for the backward half of the step."""

    ids: PackedIds
    asked: tuple[jax.Array, ...]
    """By slab, ``[N * S * C]`` int32: local rows the other devices asked of each device."""
    vectors: tuple[jax.Array | None, ...]
    """By slab, ``[N * S * C, D]`` float32 rows before the update, where ids have weights."""


@dataclasses.dataclass(frozen=True)
class Moves:
    """New values of one slab's touched rows, not yet written; per-device blocks."""

    rows: jax.Array
    """``[K]`` int32 distinct local rows, padded with R."""
    weights: jax.Array
    """``[K, D]`` float32."""
    slots: Slots
    """By name, ``[K, D]`` or ``[K]``."""


@dataclasses.dataclass(frozen=True)
class LocalEmbedding:
    """`EmbeddingCollection`'s functions for use inside your own ``shard_map``."""

    emb: EmbeddingCollection

    def lookup(self, state: EmbeddingState, ids: PackedIds) -> tuple[Activations, Residuals]:
        """Activations of this device's samples, and residuals for `update`."""
        self.emb.check_ids(ids)
        acts: Activations = {}
        asked, vectors = [], []
        for slab, part, slab_ids in zip(self.emb.layout.slabs, state.slabs, ids.slabs, strict=True):
            slab_asked, slab_vectors = self._route(slab).fetch(part, slab_ids.rows)
            acts |= pool(slab_vectors, slab_ids, ids, self.emb.feature_specs)
            asked.append(slab_asked)
            vectors.append(slab_vectors if slab_ids.weights is not None else None)
        in_order = {spec.name: acts[spec.name] for spec in self.emb.features}
        return in_order, Residuals(ids, tuple(asked), tuple(vectors))

    def row_grads(self, residuals: Residuals, grads: Activations) -> RowGrads:
        """Summed gradients of the rows this device owns."""
        self.emb.check_grads(residuals.ids, grads)
        rows, sums, slabs = [], [], []
        for slab, asked, slab_ids in zip(
            self.emb.layout.slabs, residuals.asked, residuals.ids.slabs, strict=True
        ):
            if not slab.trainable:
                continue
            local = row_gradients(grads, slab_ids, residuals.ids, self.emb.feature_specs)
            owned, summed = self._route(slab).give_back(asked, local)
            rows.append(owned)
            sums.append(summed)
            slabs.append(slab)
        return RowGrads(
            rows=tuple(rows),
            grads=tuple(sums),
            num_rows=tuple(slab.rows_per_shard for slab in slabs),
            replicated=tuple(slab.replicated for slab in slabs),
            axes=self.emb.axes,
            mesh=None,
        )

    def moves(
        self, state: EmbeddingState, row_grads: RowGrads, step: jax.Array
    ) -> tuple[Moves, ...]:
        """What each trainable slab's rule makes of its touched rows; writes nothing."""
        rates = self.emb.rates(state, step)
        slabs = self._trainable(state)
        gradients = zip(row_grads.rows, row_grads.grads, strict=True)
        return tuple(
            self._move(slab, part, slots, rows, grads, rates, step)
            for (slab, part, slots), (rows, grads) in zip(slabs, gradients, strict=True)
        )

    def write(
        self, state: EmbeddingState, moves: tuple[Moves, ...], enabled: jax.Array | bool = True
    ) -> EmbeddingState:
        """Writes moved rows and slots in place; ``enabled=False`` changes no bit."""
        remaining = iter(moves)
        slabs, slots = [], []
        for slab, part, slab_slots in zip(
            self.emb.layout.slabs, state.slabs, state.slots, strict=True
        ):
            if slab.trainable:
                part, slab_slots = _write(next(remaining), slab, part, slab_slots, enabled)
            slabs.append(part)
            slots.append(slab_slots)
        return dataclasses.replace(state, slabs=tuple(slabs), slots=tuple(slots))

    def apply(
        self,
        state: EmbeddingState,
        row_grads: RowGrads,
        step: jax.Array,
        enabled: jax.Array | bool = True,
    ) -> EmbeddingState:
        """Moves each touched row once: `moves`, then `write`."""
        return self.write(state, self.moves(state, row_grads, step), enabled)

    def update(
        self,
        state: EmbeddingState,
        residuals: Residuals,
        grads: Activations,
        step: jax.Array,
        enabled: jax.Array | bool = True,
    ) -> EmbeddingState:
        """`row_grads`, then `apply`."""
        return self.apply(state, self.row_grads(residuals, grads), step, enabled)

    def weight_grads(
        self, residuals: Residuals, grads: Activations
    ) -> tuple[jax.Array | None, ...]:
        """By slab, gradients ``[M']`` of per-id weights in buffer order; None without weights."""
        self.emb.check_grads(residuals.ids, grads)
        return tuple(
            None
            if vectors is None
            else weight_gradients(vectors, grads, slab_ids, residuals.ids, self.emb.feature_specs)
            for slab_ids, vectors in zip(residuals.ids.slabs, residuals.vectors, strict=True)
        )

    def _trainable(self, state: EmbeddingState) -> list[tuple[SlabLayout, jax.Array, Slots]]:
        parts = zip(self.emb.layout.slabs, state.slabs, state.slots, strict=True)
        return [(slab, part, slots) for slab, part, slots in parts if slab.trainable]

    def _move(
        self,
        slab: SlabLayout,
        part: jax.Array,
        slots: Slots,
        rows: jax.Array,
        grads: jax.Array,
        rates: dict[str, jax.Array],
        step: jax.Array,
    ) -> Moves:
        def read(array: jax.Array) -> jax.Array:
            return array.at[rows].get(mode="fill", fill_value=0)

        rate = row_rates(self.emb, slab, rates, rows, lax.axis_index(self.emb.axes))
        old_slots = {name: read(slot) for name, slot in slots.items()}
        moved, new_slots = slab.optimizer.update(
            read(part).astype(jnp.float32), old_slots, grads, rate, step
        )
        return Moves(rows, moved, new_slots)

    def _route(self, slab: SlabLayout) -> Route:
        return Route(
            axes=self.emb.axes,
            num_devices=self.emb.num_shards,
            replicated=slab.replicated,
            num_rows=slab.rows_per_shard,
            wire_dtype=self.emb.exchange.wire_dtype,
        )


def _write(
    moves: Moves, slab: SlabLayout, part: jax.Array, slots: Slots, enabled: jax.Array | bool
) -> tuple[jax.Array, Slots]:
    target = jnp.where(enabled, moves.rows, slab.rows_per_shard)

    def write(array: jax.Array, values: jax.Array) -> jax.Array:
        # Rows are distinct; those past the end (padding, or not enabled) are dropped.
        return array.at[target].set(values.astype(array.dtype), mode="drop", unique_indices=True)

    new_slots = {name: write(slots[name], moves.slots[name]) for name in slots}
    return write(part, moves.weights), new_slots


def num_not_finite(moves: tuple[Moves, ...], emb: EmbeddingCollection) -> jax.Array:
    """Touched rows of this device that a rule has moved to NaN or infinity; int32 scalar."""
    total = jnp.int32(0)
    slabs = [slab for slab in emb.layout.slabs if slab.trainable]
    for move, slab in zip(moves, slabs, strict=True):
        bad = ~jnp.isfinite(move.weights.astype(slab.dtype)).all(axis=1)
        total += jnp.sum(bad & (move.rows < slab.rows_per_shard), dtype=jnp.int32)
    return jnp.asarray(total)
