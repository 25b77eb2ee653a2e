# SPDX-License-Identifier: Apache-2.0
"""Tables of a row store on disk: (keys, rows, slots, counters), a block at a time.

Rows lie in the order in which the store had them at hand. What is saved does not depend on tiers or
mesh, but for the place that each row had on the devices: a hint for a store of as many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxsparse.addressing import Addressing
from jaxsparse.ckpt.arrays import array_path, check_finite, open_array
from jaxsparse.ckpt.blocks import (
    Array,
    ArrayReader,
    ArrayWriter,
    block_rows,
    finish_reads,
    write_array,
)
from jaxsparse.ckpt.manifest import (
    Manifest,
    arrays_of,
    is_value_array,
    leaf_name,
    stored_facts,
)
from jaxsparse.store.census import Census
from jaxsparse.store.contents import StoreContents, TableContents


def write_table(folder: Path, table: TableContents) -> None:
    """Writes one table; every row is read once.

    Raises:
        SaveError: a value is not finite.
        ValueError: from tensorstore, such as a full disk.
        StoreError: a row cannot be read from the store's disks.
    """
    name = table.spec.name
    # Of all arrays blocks have the same rows, so that one sweep writes each once.
    size = min(block_rows(shape, dtype, table.num_rows) for shape, dtype in table.kinds.values())
    writers = {
        array: ArrayWriter(
            array_path(folder, name, array) / "0", (table.num_rows, *shape), dtype, size
        )
        for array, (shape, dtype) in table.kinds.items()
    }
    for block in table.blocks(size):
        for array, values in block.items():
            check_finite(leaf_name(name, array), values)
            writers[array].write(values)
    for writer in writers.values():
        writer.finish()
    for array, values in table.extras.items():
        check_finite(leaf_name(name, array), values)
        step = block_rows(values.shape[1:], values.dtype, len(values))
        parts = (values[start : start + step] for start in range(0, len(values), step))
        write_array(array_path(folder, name, array) / "0", values.shape, values.dtype, parts)


def describe_contents(contents: StoreContents) -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest's entry of a store, and its leaves."""
    entry = {
        "step": contents.step,
        "tables": {n: {"rows": t.num_rows, **t.facts} for n, t in contents.tables.items()},
    }
    leaves: dict[str, Any] = {}
    for name, table in contents.tables.items():
        for array, (shape, dtype) in table.kinds.items():
            leaves[leaf_name(name, array)] = [[table.num_rows, *shape], str(dtype)]
        for array, values in table.extras.items():
            leaves[leaf_name(name, array)] = [list(values.shape), str(values.dtype)]
    return entry, leaves


class _Saved:
    """Arrays of a saved table."""

    def __init__(self, folder: Path, manifest: Manifest, table: str) -> None:
        """Opens nothing yet."""
        self._folder, self._manifest, self._table = folder, manifest, table
        self._kinds = arrays_of(manifest, table)
        self._values = [name for name in self._kinds if is_value_array(name)]

    def extra(self, name: str) -> Array | None:
        """See `SavedTable`."""
        if name not in self._kinds:
            return None
        shape, dtype = self._kinds[name]
        return self._read(
            open_array(self._folder, self._manifest, self._table, name), 0, shape, dtype
        )

    @staticmethod
    def _read(reader: ArrayReader, first: int, shape: list[int], dtype: str) -> Array:
        values: Array = np.empty(shape, dtype)
        finish_reads(reader.read_into(values, first))
        return values

    def _windows(self, num_rows: int) -> Iterator[tuple[int, dict[str, Array]]]:
        """The first row of each window, and the values of its rows."""
        kinds = {name: self._kinds[name] for name in self._values}
        size = min(block_rows(tuple(s[1:]), dtype, num_rows) for s, dtype in kinds.values())
        readers = {
            name: open_array(self._folder, self._manifest, self._table, name) for name in kinds
        }
        for start in range(0, num_rows, size):
            count = min(size, num_rows - start)
            yield (
                start,
                {
                    name: self._read(readers[name], start, [count, *shape[1:]], dtype)
                    for name, (shape, dtype) in kinds.items()
                },
            )


class SavedRows(_Saved):
    """A table that a row store had, see `jaxsparse.store.saved_table.SavedTable`."""

    def __init__(self, folder: Path, manifest: Manifest, table: str) -> None:
        """Opens nothing yet."""
        super().__init__(folder, manifest, table)
        self.facts: Mapping[str, Any] = stored_facts(manifest)[table]
        self.num_rows: int = self.facts["rows"]

    def column(self, name: str) -> Array | None:
        """See `SavedTable`."""
        return self.extra(name)

    def blocks(self) -> Iterator[tuple[slice, dict[str, Array]]]:
        """See `SavedTable`."""
        for start, arrays in self._windows(self.num_rows):
            yield slice(start, start + len(arrays["rows"])), arrays


class SavedPlain(_Saved):
    """A table that had all its rows on the devices: every row has a key, its id."""

    def __init__(self, folder: Path, manifest: Manifest, table: str) -> None:
        """Opens nothing yet."""
        super().__init__(folder, manifest, table)
        self._order = Addressing(manifest["tables"][table]["vocabulary_size"])
        self.facts: Mapping[str, Any] = {}
        self.num_rows: int = self._order.vocabulary_size

    def column(self, name: str) -> Array | None:
        """See `SavedTable`."""
        if name != "keys":
            return None
        ids = self._order.id_at(np.arange(self._order.num_positions))
        return ids[ids >= 0].view(np.uint64)

    def blocks(self) -> Iterator[tuple[slice, dict[str, Array]]]:
        """See `SavedTable`."""
        done = 0
        for start, arrays in self._windows(self._order.num_positions):
            ids = self._order.id_at(np.arange(start, start + len(arrays["rows"])))
            there = ids >= 0
            count = int(there.sum())
            yield slice(done, done + count), {n: a[there] for n, a in arrays.items()}
            done += count


def saved_census(folder: Path, manifest: Manifest) -> dict[str, Census]:
    """Where the rows of the tables of a row store lay when they were saved; needs no device."""
    found = {}
    for name in stored_facts(manifest):
        table = SavedRows(folder, manifest, name)
        keys, hotness = table.column("keys"), table.column("hotness")
        assert keys is not None and hotness is not None
        scale = np.float32(1 / table.facts["hotness_weight"])
        device, ram, ssd = table.facts["tier_rows"]
        found[name] = Census(keys, hotness * scale, (device, ram, ssd))
    return found
