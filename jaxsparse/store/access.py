# SPDX-License-Identifier: Apache-2.0
"""Single rows of a store, read and written by key wherever they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.checks import float32_rows
from jaxsparse.dynamic import L2Norm
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.processes import local_block, put_blocks
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

    def __init__(
        self, emb: EmbeddingCollection, init_words: Array, tables: Mapping[str, TableStore]
    ) -> None:
        """Takes the words new rows are drawn from."""
        self._emb, self._init_words, self._tables = emb, init_words, tables

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
        words[has_row] = self._words_of(state, store, rows[has_row])
        unknown = np.flatnonzero(~has_row)
        if unknown.size and store.default_code is not None:
            code = np.full(unknown.size, store.default_code)
            words[unknown] = self._take(state, store, code)
        elif unknown.size:
            words[unknown] = self._initial(store, keys[unknown])
        return words

    def _words_of(self, state: EmbeddingState, store: TableStore, rows: Rows) -> Words:
        """Words of rows that have values, in any order, repeats allowed."""
        words = np.empty((rows.size, store.host.ram.num_words), np.uint32)
        places = store.residency.places(rows)
        here = places != NOWHERE
        words[here] = self._take(state, store, store.code_at[places[here]])
        words[~here] = store.host.read(rows[~here])
        return words

    def _take(self, state: EmbeddingState, store: TableStore, codes: Codes) -> Words:
        emb, index = self._emb, store.slab_index
        words = np.empty((codes.size, store.host.ram.num_words), np.uint32)
        for start in range(0, codes.size, ROWS_AT_A_TIME):
            part = slice(start, start + ROWS_AT_A_TIME)
            block = make_block(store.slab, emb.num_shards, [codes[part]])
            rows = put_blocks(block.rows, emb.mesh, cut_of(emb, index))
            taken = take_rows(emb, index, state.slabs[index], state.slots[index], rows)
            arrays = {name: local_block(array) for name, array in taken.items()}
            words[part] = to_words(store.slab, arrays, block.places)
        return words

    def _initial(self, store: TableStore, keys: Keys) -> Words:
        """Words of keys as new."""
        words = np.empty((keys.size, store.host.ram.num_words), np.uint32)
        low, high = words_of(numbers_to_draw(store.spec, keys))
        for start in range(0, keys.size, ROWS_AT_A_TIME):
            part = slice(start, start + ROWS_AT_A_TIME)
            padding = (0, block_size(low[part].size) - low[part].size)
            table = np.full(low[part].size, store.number, np.int32)
            arrays = [np.pad(array, padding) for array in (low[part], high[part], table)]
            drawn = draw_initial(self._emb, store.slab_index, self._init_words, *arrays)
            write_column(store.slab, words[part], "", np.asarray(drawn)[: low[part].size])
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
        is_made = store.residency.is_made(numbers)
        words = np.empty((keys.size, store.host.ram.num_words), np.uint32)
        words[is_made] = self._words_of(state, store, numbers[is_made])
        words[~is_made] = self._initial(store, keys[~is_made])
        write_column(store.slab, words, "", values)
        places = store.residency.places(numbers)
        here = places != NOWHERE
        elsewhere = numbers[~here]
        store.host.drop(elsewhere)
        store.host.put(elsewhere, words[~here], known.hotness, known.index.keys_of)
        store.residency.set_made(elsewhere)
        return self._put(state, store, store.code_at[places[here]], words[here])

    def _put(
        self, state: EmbeddingState, store: TableStore, codes: Codes, words: Words
    ) -> EmbeddingState:
        emb, index = self._emb, store.slab_index
        slab, slots = state.slabs[index], state.slots[index]
        cut = cut_of(emb, index)
        for start in range(0, codes.size, ROWS_AT_A_TIME):
            part = slice(start, start + ROWS_AT_A_TIME)
            block = make_block(store.slab, emb.num_shards, [codes[part]])
            spread = np.zeros((block.rows.size, words.shape[1]), np.uint32)
            spread[block.places] = words[part]
            arrays = put_blocks((block.rows, spread), emb.mesh, (cut, cut))
            slab, slots = put_rows(emb, index, slab, slots, *arrays)
        slabs = (*state.slabs[:index], slab, *state.slabs[index + 1 :])
        all_slots = (*state.slots[:index], slots, *state.slots[index + 1 :])
        return dataclasses.replace(state, slabs=slabs, slots=all_slots)

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
            weights = read_column(store.slab, self._words_of(state, store, part), "")
            norms = np.linalg.norm(weights.astype(np.float64), axis=1)
            small.append(part[norms < policy.below])
        return np.concatenate([rows[:0], *small])
