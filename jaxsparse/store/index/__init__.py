# SPDX-License-Identifier: Apache-2.0
"""The key index of a table: any 64-bit keys to row numbers, and back.

`native` is C++; `reference` gives the same rows in numpy where there is no native library, and the
log says so once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from jaxsparse.ops.native import library
from jaxsparse.store.index import native, reference
from jaxsparse.store.index.arguments import (
    MAX_CAPACITY,
    Int32s,
    UInt64s,
    checked_keys,
    checked_rows,
    checked_snapshot,
)
from jaxsparse.store.index.distinct import DistinctRows, RowMarks, distinct_rows
from jaxsparse.store.index.errors import IndexFullError

__all__ = ["DistinctRows", "IndexFullError", "KeyIndex", "RowMarks", "distinct_rows"]

Implementation = Literal["native", "numpy"]


class KeyIndex:
    """Row numbers of keys. Every 64-bit value is a key; none stands for something else.

    Any number of threads may use an index; searches run side by side.

    >>> index = KeyIndex(capacity=1000)
    >>> index.insert(np.array([70, -1, 70, 0]))
    array([0, 1, 0, 2], dtype=int32)
    >>> index.remove(np.array([1], np.int32))
    >>> index.find(np.array([0, -1])), index.insert(np.array([5, 6]))
    (array([ 2, -1], dtype=int32), array([1, 3], dtype=int32))
    """

    def __init__(self, capacity: int, *, implementation: Implementation | None = None) -> None:
        """An empty index.

        Args:
            capacity: the most keys; memory grows with those that are there, not with it.
            implementation: None takes C++ where it is there.

        Raises:
            ValueError: the capacity is out of range, or there is no such implementation.
            RuntimeError: C++ was asked for and is not there; says why.
        """
        if not 1 <= capacity <= MAX_CAPACITY:
            raise ValueError(f"capacity must be 1 .. {MAX_CAPACITY} keys, got {capacity}")
        self.capacity = capacity
        self.implementation: Implementation = implementation or _best()
        """What is in use."""
        self._index = _make(self.implementation)

    def __len__(self) -> int:
        return self._index.sizes()[0]

    @property
    def high_water(self) -> int:
        """Rows ever handed out: row numbers are below it."""
        return self._index.sizes()[1]

    @property
    def nbytes(self) -> int:
        """Bytes that the index takes now, with the keys by row."""
        return self._index.sizes()[2]

    def find(self, keys: npt.ArrayLike) -> Int32s:
        """Rows of keys.

        Args:
            keys: ``[n]`` int64 or uint64: the same bits are the same key.

        Returns:
            ``[n]``, -1 where a key is absent.

        Raises:
            TypeError: keys are of another dtype.
            ValueError: keys are no vector.
        """
        return self._index.find(checked_keys(keys))

    def insert(self, keys: npt.ArrayLike) -> Int32s:
        """Rows of keys; absent ones get rows, in the order in which they come first.

        Freed rows are given first, the last freed before the others, then `high_water` and so on.

        Args:
            keys: as for `find`; a key may occur more than once.

        Raises:
            IndexFullError: there would be more than ``capacity`` keys; nothing was changed.
            TypeError: keys are of another dtype.
            ValueError: keys are no vector.
        """
        return self._index.insert(checked_keys(keys), self.capacity)

    def remove(self, rows: npt.ArrayLike) -> None:
        """Frees rows: their keys are absent afterwards.

        Args:
            rows: ``[n]`` integers, live and different.

        Raises:
            ValueError: a row is not live, or named twice; nothing was changed.
            TypeError: rows are no integers.
        """
        wrong = self._index.remove(checked_rows(rows))
        if wrong is not None:
            raise self._not_live(rows, wrong)

    def keys_of(self, rows: npt.ArrayLike) -> UInt64s:
        """Keys of live rows.

        Args:
            rows: ``[n]`` integers.

        Raises:
            ValueError: a row is not live.
            TypeError: rows are no integers.
        """
        keys = self._index.keys_of(checked_rows(rows))
        if isinstance(keys, int):
            raise self._not_live(rows, keys)
        return keys

    def rows(self) -> Int32s:
        """Live rows, ascending."""
        keys, free = self._index.arrays()
        is_live = np.ones(keys.size, np.bool_)
        is_live[free] = False
        return np.flatnonzero(is_live).astype(np.int32)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """A snapshot for `from_arrays`.

        Returns:
            ``keys`` ``[high_water]`` uint64 by row, 0 where freed, and ``free`` int32: freed rows,
            of which the last is given first.
        """
        keys, free = self._index.arrays()
        return {"keys": keys, "free": free}

    @classmethod
    def from_arrays(
        cls,
        capacity: int,
        arrays: Mapping[str, npt.NDArray[Any]],
        *,
        implementation: Implementation | None = None,
    ) -> KeyIndex:
        """The index of a snapshot: later calls give the same rows.

        Args:
            capacity: the most keys; it may have changed.
            arrays: from `arrays`.
            implementation: as for a new index, whichever the snapshot is from.

        Raises:
            IndexFullError: the snapshot has more keys than ``capacity``.
            ValueError: the arrays are no snapshot: other shapes or dtypes, a freed row that is none
                or named twice, a key of two rows.
        """
        index = cls(capacity, implementation=implementation)
        keys, free = checked_snapshot(arrays)
        live = keys.size - free.size
        if live > capacity:
            raise IndexFullError(live, capacity, 0)
        twice = index._index.restore(keys, free)
        if twice is not None:
            raise ValueError(
                f"the snapshot of a key index has key {keys[twice]} in row {twice} and in another "
                "row too; it is damaged"
            )
        return index

    def _not_live(self, rows: npt.ArrayLike, position: int) -> ValueError:
        named = np.asarray(rows)
        row = int(named[position])
        again = " any more" if row in named[:position] else ""
        return ValueError(
            f"rows must be live: row {row} at position {position} has no key{again} "
            f"({len(self)} rows below {self.high_water} are live)"
        )


def _best() -> Implementation:
    if library.is_available():
        return "native"
    _tell_once()
    return "numpy"


def _make(implementation: Implementation) -> native.Index | reference.Index:
    if implementation == "native":
        library.load()  # says why it is not there
        return native.Index()
    if implementation == "numpy":
        return reference.Index()
    raise ValueError(f"implementation must be 'native' or 'numpy', got {implementation!r}")


@functools.cache
def _tell_once() -> None:
    logging.getLogger("jaxsparse").warning(
        "key indices run in numpy, many times slower than in C++: %s", library.why_not()
    )
