# SPDX-License-Identifier: Apache-2.0
"""Rows that a row store had, in a table that has all its rows on the devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxsparse.ckpt.blocks import Array
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.state import EmbeddingState
from jaxsparse.store.access import initial_rows, scatter
from jaxsparse.store.blocks import codes_of
from jaxsparse.store.refill import join_words
from jaxsparse.store.saved_table import SavedTable


class InitialRows:
    """Reads an array of a table whose rows are all as new, as an `ArrayReader` would."""

    def __init__(self, emb: EmbeddingCollection, init_words: Array, table: str, array: str) -> None:
        """Takes the words that the rows are drawn from."""
        self._emb, self._words, self._table, self._array = emb, init_words, table, array

    def read_into(self, out: Array, first: int) -> list[tuple[Path, Any]]:
        """Rows at positions ``first ..``, at once."""
        if self._array == "rows":
            numbers = np.arange(first, first + len(out), dtype=np.uint64)
            out[:] = initial_rows(self._emb, self._words, self._table, numbers)
            return []
        slab, _ = self._emb.layout.find(self._table)
        new = slab.optimizer.init_slots(1, slab.dim)[self._array.removeprefix("slot.")]
        out[:] = np.asarray(new)
        return []


def put_saved_rows(
    emb: EmbeddingCollection, state: EmbeddingState, table: str, saved: SavedTable
) -> EmbeddingState:
    """The state, donated, with the rows that had keys; keys are ids."""
    slab, _ = emb.layout.find(table)
    index = emb.layout.slabs.index(slab)
    keys = saved.column("keys")
    assert keys is not None
    ids = keys.view(np.int64)
    for part, arrays in saved.blocks():
        codes = codes_of(emb, table, ids[part])
        state = scatter(emb, state, index, codes, join_words(slab, arrays))
    return state
