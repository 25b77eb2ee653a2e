# SPDX-License-Identifier: Apache-2.0
"""All that a row store knows of a table, block by block: what a checkpoint holds of it.

Nothing of it says where a row lies, but for a hint: a store of any tiers can take it in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.layout import SlabLayout
from jaxsparse.specs import TableSpec
from jaxsparse.state import EmbeddingState
from jaxsparse.store.access import StoredRows
from jaxsparse.store.census import Census
from jaxsparse.store.residency import NOWHERE
from jaxsparse.store.row_format import Words, columns, read_column
from jaxsparse.store.saved_table import COLUMNS, DEFAULT
from jaxsparse.store.table_store import TableStore

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int32]


def value_arrays(slab: SlabLayout) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape of a row and dtype by name of the arrays that hold the values of rows: ``rows``, and
    ``slot.<name>``."""
    return {
        array_name(column.name): (() if column.is_scalar else (column.width,), column.dtype)
        for column in columns(slab)
    }


def array_name(column: str) -> str:
    """Name in a checkpoint of a column of `row_format`."""
    return f"slot.{column}" if column else "rows"


def split_words(slab: SlabLayout, words: Words) -> dict[str, Array]:
    """Arrays by name of rows ``[n, W]``."""
    return {array_name(c.name): read_column(slab, words, c.name) for c in columns(slab)}


@dataclasses.dataclass(frozen=True)
class TableContents:
    """A table as it is now; valid until the store or the state changes."""

    spec: TableSpec
    kinds: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
    """Shape of a row and dtype of every array by row."""
    order: Rows
    """``[n]`` row numbers, in the order in which they are read: that of tiers and of places in
    them, so that disks are read from one end to the other."""
    extras: dict[str, Array]
    """Small or index-sized arrays that are not by row."""
    facts: dict[str, Any]
    """Plain values."""
    read: Callable[[Rows], dict[str, Array]]
    """Every array of some rows."""

    @property
    def num_rows(self) -> int:
        """Keys with a row."""
        return int(self.order.size)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        row = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.kinds.values())
        return row * self.num_rows + sum(array.nbytes for array in self.extras.values())

    def blocks(self, size: int) -> Iterator[dict[str, Array]]:
        """Every array, ``size`` rows at a time."""
        for start in range(0, self.num_rows, size):
            yield self.read(self.order[start : start + size])


@dataclasses.dataclass(frozen=True)
class StoreContents:
    """All tables of a store."""

    step: int
    """Batches trained."""
    tables: dict[str, TableContents]


def table_contents(access: StoredRows, state: EmbeddingState, store: TableStore) -> TableContents:
    """Looks at a table; nothing may be under way."""
    known = store.known
    store.residency.tidy()
    names = [name for name in COLUMNS if name != "times" or known.needs_times]
    kinds: dict[str, Any] = {name: ((), np.dtype(COLUMNS[name])) for name in names}

    def read(rows: Rows) -> dict[str, Array]:
        found: dict[str, Array] = {
            "keys": known.index.keys_of(rows),
            "numbers": rows,
            "places": store.residency.places(rows),
            "counts": known.counters.count[rows],
            "last": known.counters.last[rows],
            "hotness": known.hotness.of(rows),
        }
        if known.counters.time is not None:
            found["times"] = known.counters.time[rows]
        return found | split_words(store.slab, access.read_rows(state, store, rows))

    extras: dict[str, Array] = {"free": known.index.arrays()["free"], **known.admitter.arrays()}
    if store.default_code is not None:
        default = split_words(store.slab, access.read_default(state, store))
        extras |= {DEFAULT + name: array for name, array in default.items()}
    return TableContents(
        spec=store.spec,
        kinds=kinds | value_arrays(store.slab),
        order=_in_storage_order(store),
        extras=extras,
        facts={
            "device_rows": store.residency.num_places,
            "hotness_weight": known.hotness.weight,
            "tier_rows": store.tier_rows(),
        },
        read=read,
    )


def census_of(store: TableStore) -> Census:
    """Hotness and tier of every row; nothing may be under way."""
    known = store.known
    rows = _in_storage_order(store)
    rows = rows[store.owners.has(rows)]
    hotness = known.hotness.of(rows) * np.float32(1 / known.hotness.weight)
    return Census(known.index.keys_of(rows), hotness, store.tier_rows())


def _in_storage_order(store: TableStore) -> Rows:
    """All rows with a key: those on the devices, in memory, on disks."""
    rows = store.known.index.rows()
    places = store.residency.places(rows)
    here = places != NOWHERE
    on_devices, elsewhere = rows[here], rows[~here]
    on_devices = on_devices[np.argsort(places[here])]
    return np.concatenate([on_devices, store.host.in_order(elsewhere)])
