# SPDX-License-Identifier: Apache-2.0
"""Batches to look up beside training: their rows are copied to a small state of their own."""

from __future__ import annotations

import dataclasses
import threading
from functools import partial
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, PartitionSpec

from jaxsparse.agreement import failed_elsewhere
from jaxsparse.data.batch import Batch
from jaxsparse.dynamic import Dynamic
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.ladder import Ladder
from jaxsparse.layout import SlabLayout
from jaxsparse.lockstep import Lockstep, Settled
from jaxsparse.packed_batch import PackedBatch, PreparedBatch, ship_batch
from jaxsparse.processes import gather, is_shared, local_devices, put_blocks
from jaxsparse.specs import FeatureSpec
from jaxsparse.state import EmbeddingState
from jaxsparse.store.blocks import codes_of
from jaxsparse.store.row_store import RowStore
from jaxsparse.store.swap import MIN_BLOCK, block_size, cut_of
from jaxsparse.store.translate import KeyedBatch, keyed_batch, prepared_batch, prepared_empty

Keys = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A batch, and tables that hold the rows it reads."""

    emb: EmbeddingCollection
    """As the store's, but with as many places as the batch needs."""
    state: EmbeddingState
    """Plain tables are those of the state that was read."""
    samples: Batch
    """This process's."""
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
        self._small = self._emb
        self._lockstep = Lockstep(self._emb, Ladder())

    def load(
        self, state: EmbeddingState, batch: Batch | None, error: Exception | None = None
    ) -> Loaded | None:
        """Copies the rows a batch reads; a key without a row gives what `RowStore.read` does.

        In several processes a collective: each passes its samples.

        Args:
            state: the state training is at; stays usable.
            batch: the samples; None where the process has none left.
            error: what keeps this process from having a batch.

        Returns:
            None where no process has samples.

        Raises:
            Exception: ``error``, or where another process has one a RuntimeError.
            ValueError, TypeError: the batch is invalid, or the processes' differ in form.
        """
        keyed, keys = None, {}
        try:
            if batch is not None and error is None:
                keyed = keyed_batch(self._emb, None, batch)
                keys = {name: np.unique(part) for name, part in keyed.keys.items()}
        except (ValueError, TypeError) as refused:
            error = refused
        if not is_shared(self._emb.mesh):
            if error is not None:
                raise error
        else:
            keys = self._keys_of_all(keys, error)
        if not keys:
            return None
        rows = {name: self._store.read_words(state, name, part) for name, part in keys.items()}
        with self._lock:
            emb = self._collection({name: part.size for name, part in keys.items()})
            item = None
            if keyed is not None:
                item = prepared_batch(emb, keyed, _its_codes(emb, keyed, keys))
            settled = self._ship(item)
        return None if settled is None else Loaded(emb, self._state(emb, state, rows), *settled)

    def _keys_of_all(self, keys: dict[str, Keys], error: Exception | None) -> dict[str, Keys]:
        """Keys by table that some process's batch reads; none where there is no batch."""
        told = gather(self._emb.mesh, (jax.process_index(), error is not None, keys))
        for process, is_failed, _ in told:
            if is_failed:
                raise error or failed_elsewhere(process)
        parts = [part for _, _, part in told if part]
        return {
            name: np.unique(np.concatenate([part[name] for part in parts]))
            for name in (parts[0] if parts else {})
        }

    def _ship(self, prepared: PreparedBatch | None) -> Settled | None:
        lockstep, emb = self._lockstep, self._lockstep.emb
        if is_shared(emb.mesh):
            return lockstep.settle(lockstep.offer(prepared))
        assert prepared is not None, "one process has a batch"
        packed = ship_batch(emb, prepared, prepared.ids.needs(), lockstep.ladder)
        return prepared.batch, packed

    def _collection(self, sizes: dict[str, int]) -> EmbeddingCollection:
        """The same tables with room for a batch; few different ones serve a run."""
        wanted = {n: max(block_size(size), self._places[n]) for n, size in sizes.items()}
        if self._small is self._emb or wanted != self._places:
            self._places = wanted
            self._small = dataclasses.replace(
                self._emb, features=[self._feature(spec) for spec in self._emb.features]
            )
            ladder = self._lockstep.ladder
            self._lockstep = Lockstep(self._small, ladder, partial(prepared_empty, self._small))
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
            if not slab.replicated:
                devices = local_devices(emb.mesh)
                size = slab.rows_per_shard
                values = values[devices.start * size : devices.stop * size]
            cut = cut_of(emb, index)
            slabs[index] = put_blocks(values, emb.mesh, cut)
            slots[index] = _no_slots(slab, len(values), emb.mesh, cut)
        return dataclasses.replace(
            state, slabs=tuple(slabs), slots=tuple(slots), layout=emb.layout_fingerprint
        )


def _no_slots(
    slab: SlabLayout, num_rows: int, mesh: Mesh, cut: PartitionSpec
) -> dict[str, jax.Array]:
    """Slots that nobody reads: the form of a state asks for them."""
    if not slab.trainable:
        return {}
    shapes = jax.eval_shape(lambda: slab.optimizer.init_slots(num_rows, slab.dim))
    return {
        name: put_blocks(np.zeros(slot.shape, slot.dtype), mesh, cut)
        for name, slot in shapes.items()
    }


def _its_codes(
    emb: EmbeddingCollection, keyed: KeyedBatch, keys: dict[str, Keys]
) -> dict[str, npt.NDArray[np.int64]]:
    """Codes by table of a batch's occurrences, where ``keys`` fill the places in their order."""
    return {
        name: _codes(emb, name)[np.searchsorted(part, keyed.keys[name])]
        for name, part in keys.items()
    }


def _codes(emb: EmbeddingCollection, table: str) -> npt.NDArray[np.int64]:
    """Code of every place of a table."""
    slab, number = emb.layout.find(table)
    return codes_of(emb, table, np.arange(slab.tables[number].spec.vocabulary_size))
