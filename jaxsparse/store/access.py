# SPDX-License-Identifier: Apache-2.0
"""Single rows of a store, read and written by key wherever they are.

On a mesh that several processes share all of it is collective, with equal arguments everywhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import PartitionSpec

from jaxsparse.agreement import failed_elsewhere, raise_together
from jaxsparse.checks import float32_rows
from jaxsparse.dynamic import L2Norm
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.processes import gather, local_block, put_blocks
from jaxsparse.state import EmbeddingState
from jaxsparse.store.blocks import make_block
from jaxsparse.store.known_rows import NO_ROW
from jaxsparse.store.residency import NOWHERE
from jaxsparse.store.row_format import columns, read_column, to_words, write_column
from jaxsparse.store.swap import block_size, cut_of, draw_initial, put_rows, take_rows, words_of
from jaxsparse.store.table_store import TableStore
from jaxsparse.store.translate import numbers_to_draw

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint64]
Words = npt.NDArray[np.uint32]
Codes = npt.NDArray[np.int64]

NEARLY_FULL = 0.9
"""Share of a table's rows in use from which `L2Norm` looks for small ones."""

ROWS_AT_A_TIME = 1 << 16


class StoredRows:
    """Reads and writes; nothing may be under way meanwhile."""

    def __init__(self, emb: EmbeddingCollection, init_words: Array) -> None:
        """Takes the words new rows are drawn from."""
        self._emb, self._init_words = emb, init_words

    def read_column(self, state: EmbeddingState, store: TableStore, keys: Keys, name: str) -> Array:
        """Weights (name "") or a slot of keys ``[n]``."""
        return read_column(store.slab, self.read(state, store, keys), name)

    def read_slots(self, state: EmbeddingState, store: TableStore, keys: Keys) -> dict[str, Array]:
        """All slots of keys ``[n]``."""
        words = self.read(state, store, keys)
        names = [column.name for column in columns(store.slab) if column.name]
        return {name: read_column(store.slab, words, name) for name in names}

    def read(self, state: EmbeddingState, store: TableStore, keys: Keys) -> Words:
        """Words ``[n, W]`` of keys."""
        rows = store.known.index.find(keys)
        has_row = rows != NO_ROW
        has_row[has_row] = store.residency.is_made(rows[has_row])
        words = np.empty((keys.size, store.host.ram.num_words), np.uint32)
        words[has_row] = self._all_words_of(state, store, rows[has_row])
        unknown = np.flatnonzero(~has_row)
        if unknown.size and store.default_code is not None:
            words[unknown] = self.read_default(state, store)
        elif unknown.size:
            words[unknown] = self._initial(store, keys[unknown])
        return words

    def read_rows(self, state: EmbeddingState, store: TableStore, rows: Rows) -> Words:
        """Words ``[n, W]`` of rows that have keys; those without values yet as new.

        Of those that other processes have, they are undefined.
        """
        is_made = store.residency.is_made(rows)
        if is_made.all():
            return self._words_of(state, store, rows)
        words = np.empty((rows.size, store.host.ram.num_words), np.uint32)
        words[is_made] = self._words_of(state, store, rows[is_made])
        words[~is_made] = self._initial(store, store.known.index.keys_of(rows[~is_made]))
        return words

    def read_default(self, state: EmbeddingState, store: TableStore) -> Words:
        """Words ``[1, W]`` of the default row, which the table has."""
        code = np.array([store.default_code])
        return self._from_all(self._take(state, store, code), store.process_of(code))

    def _all_words_of(self, state: EmbeddingState, store: TableStore, rows: Rows) -> Words:
        """As `_words_of`, those that other processes have among them."""
        error = None
        try:
            words = self._words_of(state, store, rows)
        except Exception as failed:
            words, error = np.empty((rows.size, store.host.ram.num_words), np.uint32), failed
        return self._from_all(words, store.owners.process_of(rows), error)

    def _from_all(
        self, words: Words, process: Rows | None, error: Exception | None = None
    ) -> Words:
        """Words ``[n, W]`` of which each process has some.

        Args:
            words: in place of the other processes' are any.
            process: ``[n]`` who has them; None where every one has all.
            error: what has kept this process from its own.
        """
        if process is None:
            raise_together(self._emb.mesh, error)
            return words
        me = jax.process_index()
        told = gather(self._emb.mesh, (me, None if error else words[process == me]))
        for other, part in told:
            if part is None:
                raise error or failed_elsewhere(other)
            words[process == other] = part
        return words

    def _words_of(self, state: EmbeddingState, store: TableStore, rows: Rows) -> Words:
        """Words of rows that have values, in any order, repeats allowed; of those that other
        processes have, they are undefined."""
        words = np.empty((rows.size, store.host.ram.num_words), np.uint32)
        places = store.residency.places(rows)
        here = places != NOWHERE
        words[here] = self._take(state, store, store.code_at[places[here]])
        here |= ~store.owners.has(rows)
        words[~here] = store.host.read(rows[~here])
        return words

    def _take(self, state: EmbeddingState, store: TableStore, codes: Codes) -> Words:
        emb, index = self._emb, store.slab_index
        words = np.empty((codes.size, store.host.ram.num_words), np.uint32)
        for start in range(0, codes.size, ROWS_AT_A_TIME):
            part = slice(start, start + ROWS_AT_A_TIME)
            block = make_block(emb, index, [codes[part]])
            rows = put_blocks(block.rows, emb.mesh, cut_of(emb, index))
            taken = take_rows(emb, index, state.slabs[index], state.slots[index], rows)
            arrays = {name: local_block(array) for name, array in taken.items()}
            own = block.own(0, np.arange(start, start + codes[part].size))
            words[own] = to_words(store.slab, arrays, block.places[0])
        return words

    def _initial(self, store: TableStore, keys: Keys) -> Words:
        """Words of keys as new."""
        words = np.empty((keys.size, store.host.ram.num_words), np.uint32)
        numbers = numbers_to_draw(store.spec, keys)
        drawn = initial_rows(self._emb, self._init_words, store.spec.name, numbers)
        write_column(store.slab, words, "", drawn)
        slab = store.slab
        slots = slab.optimizer.init_slots(1, slab.dim) if slab.trainable else {}
        for name, slot in slots.items():
            write_column(slab, words, name, np.repeat(np.asarray(slot), keys.size, axis=0))
        return words

    def write(
        self, state: EmbeddingState, store: TableStore, keys: Keys, rows: npt.ArrayLike, step: int
    ) -> EmbeddingState:
        """Overwrites the weights of distinct keys ``[n]``; see `RowStore.write`."""
        name, dim = store.spec.name, store.spec.embedding_dim
        values = float32_rows(name, rows)
        if values.shape != (keys.size, dim):
            raise ValueError(f"write {name!r}: rows must be {(keys.size, dim)}, got {values.shape}")
        if np.unique(keys).size != keys.size:
            raise ValueError(f"write {name!r}: keys must be distinct; write each row once")
        known = store.known
        numbers = known.add_keys(keys, step)
        store.owners.note(numbers, keys)
        places = store.residency.places(numbers)
        here = places != NOWHERE
        elsewhere = ~here & store.owners.has(numbers)
        error = None
        try:
            words = self.read_rows(state, store, numbers)
            write_column(store.slab, words, "", values)
            store.host.drop(numbers[elsewhere])
            worth = known.worth(numbers[elsewhere])
            store.host.put(numbers[elsewhere], words[elsewhere], worth, known.index.keys_of)
        except Exception as failed:
            error = failed
        raise_together(self._emb.mesh, error)
        store.residency.set_made(numbers[~here])
        codes = store.code_at[places[here]]
        return scatter(self._emb, state, store.slab_index, codes, words[here])

    def small_rows(self, state: EmbeddingState, store: TableStore) -> Rows:
        """Rows that `L2Norm` gives up, once the table is nearly full."""
        policy, known = store.known.eviction, store.known
        if not isinstance(policy, L2Norm) or len(known) < NEARLY_FULL * known.capacity:
            return np.zeros(0, np.int32)
        rows = known.index.rows()
        rows = rows[store.residency.is_made(rows)]
        small = []
        for start in range(0, rows.size, ROWS_AT_A_TIME):
            part = rows[start : start + ROWS_AT_A_TIME]
            error, is_small = None, np.zeros((part.size, 1), np.uint32)
            try:
                weights = read_column(store.slab, self._words_of(state, store, part), "")
                norms = np.linalg.norm(weights.astype(np.float64), axis=1)
                is_small[:, 0] = norms < policy.below
            except Exception as failed:
                error = failed
            is_small = self._from_all(is_small, store.owners.process_of(part), error)
            small.append(part[is_small[:, 0] > 0])
        return np.concatenate([rows[:0], *small])


def initial_rows(
    emb: EmbeddingCollection, init_words: Array, table: str, numbers: Keys
) -> npt.NDArray[np.float32]:
    """Rows ``[n, D]`` of a table as new, by the numbers ``[n]`` they are drawn from."""
    slab, number = emb.layout.find(table)
    index = emb.layout.slabs.index(slab)
    low, high = words_of(numbers)
    values = np.empty((numbers.size, slab.dim), np.float32)
    for start in range(0, numbers.size, ROWS_AT_A_TIME):
        part = slice(start, start + ROWS_AT_A_TIME)
        count = low[part].size
        padding = (0, block_size(count) - count)
        of_table = np.full(count, number, np.int32)
        arrays = [np.pad(array, padding) for array in (low[part], high[part], of_table)]
        whole = [PartitionSpec()] * 4
        drawn = draw_initial(emb, index, *put_blocks([init_words, *arrays], emb.mesh, whole))
        values[part] = np.asarray(drawn)[:count]
    return values


def scatter(
    emb: EmbeddingCollection, state: EmbeddingState, index: int, codes: Codes, words: Words
) -> EmbeddingState:
    """The state, donated, with rows of a slab overwritten.

    Args:
        emb: the collection.
        state: its state.
        index: of the slab.
        codes: ``[n]`` distinct, shard * rows per shard + local row.
        words: ``[n, W]``.
    """
    slab, slots = state.slabs[index], state.slots[index]
    cut = cut_of(emb, index)
    for start in range(0, codes.size, ROWS_AT_A_TIME):
        part = slice(start, start + ROWS_AT_A_TIME)
        block = make_block(emb, index, [codes[part]])
        spread = np.zeros((block.rows.size, words.shape[1]), np.uint32)
        spread[block.places[0]] = block.own(0, words[part])
        arrays = put_blocks((block.rows, spread), emb.mesh, (cut, cut))
        slab, slots = put_rows(emb, index, slab, slots, *arrays)
    slabs = (*state.slabs[:index], slab, *state.slabs[index + 1 :])
    all_slots = (*state.slots[:index], slots, *state.slots[index + 1 :])
    return dataclasses.replace(state, slabs=slabs, slots=all_slots)
