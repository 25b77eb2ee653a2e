# SPDX-License-Identifier: Apache-2.0
"""Takes a saved table into a row store of any tiers, block by block."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.layout import SlabLayout
from jaxsparse.state import EmbeddingState
from jaxsparse.store.access import scatter
from jaxsparse.store.contents import array_name
from jaxsparse.store.errors import StoreFullError
from jaxsparse.store.known_rows import KnownRows
from jaxsparse.store.residency import NOWHERE
from jaxsparse.store.row_format import Words, columns, num_words, write_column
from jaxsparse.store.saved_table import DEFAULT, SavedTable
from jaxsparse.store.table_store import TableStore

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int32]


def check_room(store: TableStore, saved: SavedTable) -> None:
    """Raises StoreFullError where a saved table has more rows than a store has room for."""
    need, have = saved.num_rows, store.known.capacity
    if need > have:
        raise StoreFullError(
            f"table {store.spec.name!r}: the saved table has {need:,} rows, this one has room for "
            f"{have:,}; raise Dynamic(capacity=)"
        )


def refill(
    emb: EmbeddingCollection, state: EmbeddingState, store: TableStore, saved: SavedTable
) -> EmbeddingState:
    """The state with all that a table had when it was saved; what the store had is gone.

    Args:
        emb: the collection.
        state: donated.
        store: of the table.
        saved: fits it (`check_room`).

    Raises:
        ValueError: what was saved contradicts itself; store and state are lost then.
    """
    slab = store.slab
    store.host.clear()
    numbers = _numbers(saved)
    known = store.known = KnownRows(store.spec)
    known.take_in(saved, numbers)
    places = _places(store, saved, numbers)
    store.residency = store.new_residency()
    store.residency.take_in(numbers, places)
    for part, arrays in saved.blocks():
        words = join_words(slab, arrays)
        here = places[part] != NOWHERE
        rows = numbers[part][~here]
        store.host.put(rows, words[~here], known.worth(rows), known.index.keys_of)
        codes = store.code_at[places[part][here]]
        state = scatter(emb, state, store.slab_index, codes, words[here])
    if store.default_code is not None:
        state = _put_default(emb, state, store, saved)
    return state


def join_words(slab: SlabLayout, arrays: dict[str, Array]) -> Words:
    """Rows ``[n, W]`` of arrays by name; the inverse of `split_words`."""
    words = np.empty((len(arrays["rows"]), num_words(slab)), np.uint32)
    for column in columns(slab):
        write_column(slab, words, column.name, arrays[array_name(column.name)])
    return words


def _numbers(saved: SavedTable) -> Rows:
    numbers = saved.column("numbers")
    if numbers is None:
        return np.arange(saved.num_rows, dtype=np.int32)
    return numbers.astype(np.int32, copy=False)


def _places(store: TableStore, saved: SavedTable, numbers: Rows) -> Rows:
    """Places ``[n]`` of rows: as they were, where there are as many; else the hottest get one."""
    count, places = store.residency.num_places, saved.column("places")
    if places is not None and saved.facts["device_rows"] == count:
        return places.astype(np.int32, copy=False)
    places = np.full(numbers.size, NOWHERE, np.int32)
    chosen = np.arange(numbers.size)
    if count < numbers.size:
        hottest = np.argpartition(-store.known.hotness.of(numbers), count - 1)
        chosen = np.sort(hottest[:count])
    places[chosen] = np.arange(chosen.size, dtype=np.int32)
    return places


def _put_default(
    emb: EmbeddingCollection, state: EmbeddingState, store: TableStore, saved: SavedTable
) -> EmbeddingState:
    arrays = {}
    for column in columns(store.slab):
        name = array_name(column.name)
        array = saved.extra(DEFAULT + name)
        if array is None:
            return state
        arrays[name] = array
    words = join_words(store.slab, arrays)
    return scatter(emb, state, store.slab_index, np.array([store.default_code]), words)
