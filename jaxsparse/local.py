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

    def apply(
        self,
        state: EmbeddingState,
        row_grads: RowGrads,
        step: jax.Array,
        enabled: jax.Array | bool = True,
    ) -> EmbeddingState:
        """Moves each touched row once; ``enabled=False`` changes no bit."""
        rates = self.emb.rates(state, step)
        gradients = iter(zip(row_grads.rows, row_grads.grads, strict=True))
        slabs, slots = [], []
        for slab, part, slab_slots in zip(
            self.emb.layout.slabs, state.slabs, state.slots, strict=True
        ):
            if slab.trainable:
                rows, grads = next(gradients)
                part, slab_slots = self._apply_slab(
                    slab, part, slab_slots, rows, grads, rates, step, enabled
                )
            slabs.append(part)
            slots.append(slab_slots)
        return dataclasses.replace(state, slabs=tuple(slabs), slots=tuple(slots))

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

    def _apply_slab(
        self,
        slab: SlabLayout,
        part: jax.Array,
        slots: Slots,
        rows: jax.Array,
        grads: jax.Array,
        rates: dict[str, jax.Array],
        step: jax.Array,
        enabled: jax.Array | bool,
    ) -> tuple[jax.Array, Slots]:
        def read(array: jax.Array) -> jax.Array:
            return array.at[rows].get(mode="fill", fill_value=0)

        rate = row_rates(self.emb, slab, rates, rows, lax.axis_index(self.emb.axes))
        moved, new_slots = slab.optimizer.update(
            read(part).astype(jnp.float32),
            {n: read(s) for n, s in slots.items()},
            grads,
            rate,
            step,
        )
        target = jnp.where(enabled, rows, slab.rows_per_shard)

        def write(array: jax.Array, values: jax.Array) -> jax.Array:
            # Rows are distinct; those past the end (padding, or not enabled) are dropped.
            return array.at[target].set(
                values.astype(array.dtype), mode="drop", unique_indices=True
            )

        return write(part, moved), {name: write(slots[name], new_slots[name]) for name in slots}

    def _route(self, slab: SlabLayout) -> Route:
        return Route(
            axes=self.emb.axes,
            num_devices=self.emb.num_shards,
            replicated=slab.replicated,
            num_rows=slab.rows_per_shard,
            wire_dtype=self.emb.exchange.wire_dtype,
        )
