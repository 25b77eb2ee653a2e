# SPDX-License-Identifier: Apache-2.0
"""Batches to look up beside training: their rows are copied to a small state of their own."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding

from jaxsparse.data.batch import Batch
from jaxsparse.dynamic import Dynamic
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.ladder import Ladder
from jaxsparse.layout import SlabLayout
from jaxsparse.packed_batch import PackedBatch, PreparedBatch, ship_batch
from jaxsparse.specs import FeatureSpec
from jaxsparse.state import EmbeddingState
from jaxsparse.store.blocks import codes_of
from jaxsparse.store.row_store import RowStore
from jaxsparse.store.swap import MIN_BLOCK, block_size, cut_of
from jaxsparse.store.translate import KeyedBatch, keyed_batch

Keys = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A batch, and tables that hold the rows it reads."""

    emb: EmbeddingCollection
    """As the store's, but with as many places as the batch needs."""
    state: EmbeddingState
    """Plain tables are those of the state that was read."""
    batch: PackedBatch


class RowReader:
    """Looks batches up whatever is under way; any thread may. No row moves, no state is donated."""

    def __init__(self, store: RowStore) -> None:
        """Reads from ``store``."""
        self._store, self._emb = store, store.emb
        self._lock = threading.Lock()
        """Held by whoever chooses sizes: those of one request must not be another's."""
        # Of a batch of empty bags too a table has some.
        self._places = dict.fromkeys(store.emb.stored_tables, MIN_BLOCK)
        self._small: EmbeddingCollection | None = None
        self._ladder = Ladder()

    def load(self, state: EmbeddingState, batch: Batch) -> Loaded:
        """Copies the rows a batch reads; a key without a row gives what `RowStore.read` does.

        Args:
            state: the state training is at; stays usable.
            batch: the samples.
        """
        keyed = keyed_batch(self._emb, batch)
        found = {name: np.unique(keys, return_inverse=True) for name, keys in keyed.keys.items()}
        with self._lock:
            emb = self._collection({name: keys.size for name, (keys, _) in found.items()})
        rows = {
            name: self._store.read_words(state, name, keys) for name, (keys, _) in found.items()
        }
        codes = {name: _codes(emb, name)[inverse] for name, (_, inverse) in found.items()}
        return Loaded(emb, self._state(emb, state, rows), self._packed(emb, keyed, codes))

    def _collection(self, sizes: dict[str, int]) -> EmbeddingCollection:
        """The same tables with room for a batch; few different ones serve a run."""
        wanted = {n: max(block_size(size), self._places[n]) for n, size in sizes.items()}
        if self._small is None or wanted != self._places:
            self._places = wanted
            self._small = dataclasses.replace(
                self._emb, features=[self._feature(spec) for spec in self._emb.features]
            )
        return self._small

    def _feature(self, spec: FeatureSpec) -> FeatureSpec:
        table = spec.table
        # Not "auto": of a small table it could make something else.
        fields: dict[str, Any] = {"placement": self._emb.plan.placements[table.name]}
        if table.is_stored:
            keys = Dynamic(self._places[table.name])
            fields |= {"vocabulary_size": None, "keys": keys, "tiers": None}
        return dataclasses.replace(spec, table=dataclasses.replace(table, **fields))

    def _state(
        self, emb: EmbeddingCollection, state: EmbeddingState, rows: dict[str, Any]
    ) -> EmbeddingState:
        """The rows in small slabs; slabs of plain tables as they are."""
        slabs, slots = list(state.slabs), list(state.slots)
        for index, (slab, old) in enumerate(
            zip(emb.layout.slabs, self._emb.layout.slabs, strict=True)
        ):
            if not slab.is_stored:
                places = [[(b.shard, b.offset) for b in s.tables] for s in (slab, old)]
                assert places[0] == places[1], "tables are dealt out by load, and that is the same"
                continue
            num_blocks = 1 if slab.replicated else emb.num_shards
            values = np.zeros((num_blocks * slab.rows_per_shard, slab.dim), np.float32)
            for block in slab.tables:
                name = block.spec.name
                values[_codes(emb, name)[: len(rows[name])]] = rows[name]
            sharding = NamedSharding(emb.mesh, cut_of(emb, index))
            slabs[index] = jax.device_put(values, sharding)
            slots[index] = _no_slots(slab, len(values), sharding)
        return dataclasses.replace(
            state, slabs=tuple(slabs), slots=tuple(slots), layout=emb.layout_fingerprint
        )

    def _packed(
        self, emb: EmbeddingCollection, keyed: KeyedBatch, codes: dict[str, Any]
    ) -> PackedBatch:
        ids = keyed.with_codes(codes, self._emb.feature_specs)
        prepared = emb.prepare_addressed(keyed.batch.features, ids)
        ready = PreparedBatch(keyed.batch, prepared)
        with self._lock:
            return ship_batch(emb, ready, prepared.needs(), self._ladder)


def _no_slots(slab: SlabLayout, num_rows: int, sharding: NamedSharding) -> dict[str, jax.Array]:
    """Slots that nobody reads: the form of a state asks for them."""
    if not slab.trainable:
        return {}
    shapes = jax.eval_shape(lambda: slab.optimizer.init_slots(num_rows, slab.dim))
    return {
        name: jax.device_put(np.zeros(slot.shape, slot.dtype), sharding)
        for name, slot in shapes.items()
    }


def _codes(emb: EmbeddingCollection, table: str) -> npt.NDArray[np.int64]:
    """Code of every place of a table."""
    slab, number = emb.layout.find(table)
    return codes_of(emb, table, np.arange(slab.tables[number].spec.vocabulary_size))
