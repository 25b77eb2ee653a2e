# SPDX-License-Identifier: Apache-2.0
"""The embedding layer on per-device blocks: what runs inside a ``shard_map`` over the mesh."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jaxsparse.bag_plan import LevelPlan
from jaxsparse.bag_pooling import bag_row_gradients, bag_weight_gradients, pool_bags
from jaxsparse.exchange import Gradients, Route
from jaxsparse.layout import SlabLayout, fixed_rows
from jaxsparse.moves import ROUNDING_SEED, FusedMoves, Moves
from jaxsparse.ops.row_update import NATIVE_ROWS, XLA_ROWS, MovedRows, RowAccess, is_fused
from jaxsparse.ops.segment_sum import BagGradients
from jaxsparse.optimizers import Slots
from jaxsparse.packed import PackedIds, SlabIds
from jaxsparse.pooling import Activations, pool, row_gradients, weight_gradients
from jaxsparse.row_grads import RowGrads
from jaxsparse.row_tables import row_tables
from jaxsparse.state import EmbeddingState

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
class LocalEmbedding:
    """`EmbeddingCollection`'s functions for use inside your own ``shard_map``."""

    emb: EmbeddingCollection

    def lookup(self, state: EmbeddingState, ids: PackedIds) -> tuple[Activations, Residuals]:
        """Activations of this device's samples, and residuals for `update`."""
        self.emb.check_ids(ids)
        acts: Activations = {}
        asked, vectors = [], []
        for slab, part, slab_ids in zip(self.emb.layout.slabs, state.slabs, ids.slabs, strict=True):
            route = self._route(slab)
            slab_asked = route.ask(slab_ids.rows)
            slab_vectors = route.answer(part, slab_asked)
            pooled = self._pool(route, part, slab_vectors, slab_ids, ids)
            asked.append(_known_after(slab_asked, next(iter(pooled.values()))))
            acts |= pooled
            vectors.append(slab_vectors if slab_ids.weights is not None else None)
        in_order = {spec.name: acts[spec.name] for spec in self.emb.features}
        return in_order, Residuals(ids, tuple(asked), tuple(vectors))

    def row_grads(self, residuals: Residuals, grads: Activations) -> RowGrads:
        """Summed gradients of the rows this device owns."""
        owned = self._owned_gradients(residuals, grads)
        slabs = [slab for slab in self.emb.layout.slabs if slab.trainable]
        return RowGrads(
            rows=tuple(rows for rows, _ in owned),
            grads=tuple(self._summed(sums) for _, sums in owned),
            num_rows=tuple(slab.rows_per_shard for slab in slabs),
            replicated=tuple(slab.replicated for slab in slabs),
            axes=self.emb.axes,
            path=self.emb.path,
            mesh=None,
        )

    def moves(
        self, state: EmbeddingState, row_grads: RowGrads, step: jax.Array
    ) -> tuple[Moves, ...]:
        """What each trainable slab's rule makes of its touched rows; writes nothing."""
        return self._moves(state, list(zip(row_grads.rows, row_grads.grads, strict=True)), step)

    def write(
        self, state: EmbeddingState, moves: tuple[Moves, ...], enabled: jax.Array | bool = True
    ) -> EmbeddingState:
        """Writes moved rows and slots in place; ``enabled=False`` changes no bit."""
        remaining, flag = iter(moves), jnp.asarray(enabled, bool)
        slabs, slots = [], []
        for slab, part, slab_slots in zip(
            self.emb.layout.slabs, state.slabs, state.slots, strict=True
        ):
            if slab.trainable:
                move = next(remaining)
                if isinstance(move, MovedRows):
                    part, slab_slots = self._access.put(move, part, slab_slots, flag)
                else:
                    part, slab_slots = move.put(part, slab_slots, flag)
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
        """`row_grads`, then `apply`: nobody sees the sums, and a kernel need not write them."""
        return self.write(
            state, self._moves(state, self._owned_gradients(residuals, grads), step), enabled
        )

    def weight_grads(
        self, residuals: Residuals, grads: Activations
    ) -> tuple[jax.Array | None, ...]:
        """By slab, gradients ``[M']`` of per-id weights in buffer order; None without weights."""
        self.emb.check_grads(residuals.ids, grads)
        return tuple(
            None
            if vectors is None
            else self._weight_gradients(vectors, grads, slab_ids, residuals.ids)
            for slab_ids, vectors in zip(residuals.ids.slabs, residuals.vectors, strict=True)
        )

    def _pool(
        self, route: Route, part: jax.Array, vectors: jax.Array, slab: SlabIds, ids: PackedIds
    ) -> Activations:
        specs = self.emb.feature_specs
        if isinstance(slab.plan, LevelPlan):
            return pool(vectors, slab, ids, specs)
        # Rows of this device are pooled from where they lie; nobody then needs ``vectors``.
        table, rows = (part, slab.rows) if route.is_local else (vectors, None)
        return pool_bags(table, rows, slab, slab.plan, ids, specs, self.emb.path)

    def _owned_gradients(self, residuals: Residuals, grads: Activations) -> list[Gradients]:
        """By trainable slab, the distinct rows this device owns and their gradients."""
        self.emb.check_grads(residuals.ids, grads)
        ids = residuals.ids
        parts = zip(self.emb.layout.slabs, residuals.asked, ids.slabs, strict=True)
        return [
            self._route(slab).give_back(asked, self._row_gradients(grads, slab_ids, ids))
            for slab, asked, slab_ids in parts
            if slab.trainable
        ]

    def _summed(self, grads: jax.Array | BagGradients) -> jax.Array:
        return grads.sum(self.emb.path) if isinstance(grads, BagGradients) else grads

    def _row_gradients(
        self, grads: Activations, slab: SlabIds, ids: PackedIds
    ) -> jax.Array | BagGradients:
        specs = self.emb.feature_specs
        if isinstance(slab.plan, LevelPlan):
            return row_gradients(grads, slab, ids, specs)
        return bag_row_gradients(grads, slab, slab.plan, ids, specs)

    def _weight_gradients(
        self, vectors: jax.Array, grads: Activations, slab: SlabIds, ids: PackedIds
    ) -> jax.Array:
        specs = self.emb.feature_specs
        if isinstance(slab.plan, LevelPlan):
            return weight_gradients(vectors, grads, slab, ids, specs)
        return bag_weight_gradients(vectors, grads, slab, slab.plan, ids, specs)

    def _trainable(self, state: EmbeddingState) -> list[tuple[SlabLayout, jax.Array, Slots]]:
        parts = zip(self.emb.layout.slabs, state.slabs, state.slots, strict=True)
        return [(slab, part, slots) for slab, part, slots in parts if slab.trainable]

    def _moves(
        self, state: EmbeddingState, gradients: list[Gradients], step: jax.Array
    ) -> tuple[Moves, ...]:
        rates = self.emb.rates(state, step)
        slabs = self._trainable(state)
        return tuple(
            self._move(slab, part, slots, rows, grads, rates, step)
            for (slab, part, slots), (rows, grads) in zip(slabs, gradients, strict=True)
        )

    def _move(
        self,
        slab: SlabLayout,
        part: jax.Array,
        slots: Slots,
        rows: jax.Array,
        grads: jax.Array | BagGradients,
        rates: dict[str, jax.Array],
        step: jax.Array,
    ) -> Moves:
        device = lax.axis_index(self.emb.axes)
        tables = row_tables(self.emb, slab, rates, device)
        for owner, row in fixed_rows(slab, self.emb.num_shards):
            is_fixed = (rows == row) & (slab.replicated | (device == owner))
            rows = jnp.where(is_fixed, slab.rows_per_shard, rows)
        if self.emb.path != "xla" and is_fused(slab.optimizer):
            rule, path = slab.optimizer, self.emb.path
            return FusedMoves(rule, part, slots, rows, grads, tables, step, path)
        rate, noise = tables.of(rows)
        summed = self._summed(grads)
        return self._access.move(
            slab.optimizer, part, slots, rows, summed, rate, step, noise, ROUNDING_SEED
        )

    @property
    def _access(self) -> RowAccess:
        return NATIVE_ROWS if self.emb.path == "native" else XLA_ROWS

    def _route(self, slab: SlabLayout) -> Route:
        return Route(
            axes=self.emb.axes,
            num_devices=self.emb.num_shards,
            replicated=slab.replicated,
            num_rows=slab.rows_per_shard,
            wire_dtype=self.emb.exchange.wire_dtype,
            path=self.emb.path,
            access=self._access,
        )


def _known_after(rows: jax.Array, read: jax.Array) -> jax.Array:
    """The rows, as values that depend on what was ``read``.

    An update of these rows then comes after the reading. Where gradients do not depend on
    activations XLA sees no order between two kernels, and would copy the table to have none.
    """
    if read.size == 0:
        return rows
    never = read[(0,) * read.ndim] > jnp.inf
    return rows + never.astype(rows.dtype)
