# SPDX-License-Identifier: Apache-2.0
"""The index in numpy: what it means, and what runs without the native library.

Live keys are kept sorted beside their rows, so a batch is found by binary search and an insertion
copies the whole: right at any size, and several times slower than `native` at large ones.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.store.index.arguments import Int32s, UInt64s
from jaxsparse.store.index.errors import IndexFullError


class Index:
    """See `jaxsparse.store.index.KeyIndex`; keys are uint64, rows int32, both checked before."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._by_row = np.zeros(0, np.uint64)
        """Key of each row, with room beyond `_high_water`."""
        self._is_live = np.zeros(0, np.bool_)
        self._high_water = 0
        self._free: list[int] = []
        """Freed rows; the last is given first."""
        self._sorted_keys = np.zeros(0, np.uint64)
        self._sorted_rows = np.zeros(0, np.int32)

    def sizes(self) -> tuple[int, int, int]:
        """Live keys, rows ever handed out, bytes."""
        with self._lock:
            held = (self._by_row, self._is_live, self._sorted_keys, self._sorted_rows)
            num_bytes = sum(array.nbytes for array in held) + 8 * len(self._free)
            return self._sorted_keys.size, self._high_water, num_bytes

    def find(self, keys: UInt64s) -> Int32s:
        """Rows of keys, -1 where absent."""
        with self._lock:
            place = np.searchsorted(self._sorted_keys, keys)
            # Behind the last key there is none to compare with.
            is_there = place < self._sorted_keys.size
            is_there[is_there] = self._sorted_keys[place[is_there]] == keys[is_there]
            rows = np.full(keys.size, -1, np.int32)
            rows[is_there] = self._sorted_rows[place[is_there]]
            return rows

    def insert(self, keys: UInt64s, capacity: int) -> Int32s:
        """Rows of keys; absent ones are given rows in the order of first occurrence."""
        with self._lock:
            rows = self.find(keys)
            missing = np.flatnonzero(rows < 0)
            new, first, inverse = np.unique(keys[missing], return_index=True, return_inverse=True)
            live = self._sorted_keys.size
            if live + new.size > capacity:
                raise IndexFullError(live + new.size, capacity, live)
            new_rows = np.empty(new.size, np.int32)
            new_rows[np.argsort(first)] = self._take(new.size)
            self._by_row[new_rows] = new
            self._is_live[new_rows] = True
            place = np.searchsorted(self._sorted_keys, new)
            self._sorted_keys = np.insert(self._sorted_keys, place, new)
            self._sorted_rows = np.insert(self._sorted_rows, place, new_rows)
            rows[missing] = new_rows[inverse]
            return rows

    def _take(self, count: int) -> Int32s:
        """The next rows, in the order in which they are given."""
        again = min(count, len(self._free))
        freed = self._free[len(self._free) - again :][::-1]
        del self._free[len(self._free) - again :]
        start = self._high_water
        self._high_water += count - again
        if self._high_water > self._by_row.size:
            room = max(self._high_water, self._by_row.size * 5 // 4) - self._by_row.size
            self._by_row = np.append(self._by_row, np.zeros(room, np.uint64))
            self._is_live = np.append(self._is_live, np.zeros(room, np.bool_))
        fresh = np.arange(start, self._high_water, dtype=np.int32)
        return np.concatenate([np.array(freed, np.int32), fresh])

    def first_not_live(self, rows: Int32s) -> int | None:
        """Position of the first row that has no key."""
        is_known = (rows >= 0) & (rows < self._high_water)
        is_known[is_known] = self._is_live[rows[is_known]]
        return None if is_known.all() else int(np.argmin(is_known))

    def remove(self, rows: Int32s) -> int | None:
        """Frees rows; or the position of the first that is not live, or not any more."""
        with self._lock:
            _, first = np.unique(rows, return_index=True)
            is_again = np.ones(rows.size, np.bool_)
            is_again[first] = False
            wrong = self.first_not_live(rows)
            if is_again.any():
                again = int(np.argmax(is_again))
                wrong = again if wrong is None else min(wrong, again)
            if wrong is not None:
                return wrong
            self._by_row[rows] = 0
            self._is_live[rows] = False
            self._free.extend(rows.tolist())
            stays = self._is_live[self._sorted_rows]
            self._sorted_keys = self._sorted_keys[stays]
            self._sorted_rows = self._sorted_rows[stays]
            return None

    def keys_of(self, rows: Int32s) -> UInt64s | int:
        """Keys of rows; or the position of the first that is not live."""
        with self._lock:
            wrong = self.first_not_live(rows)
            return self._by_row[rows] if wrong is None else wrong

    def arrays(self) -> tuple[UInt64s, Int32s]:
        """Key by row (0 where freed), and the freed rows; the last is given first."""
        with self._lock:
            return self._by_row[: self._high_water].copy(), np.array(self._free, np.int32)

    def restore(self, keys: UInt64s, free: Int32s) -> int | None:
        """Fills a new index; or a row whose key another row has too.

        ``free`` holds different rows of ``keys``.
        """
        self._by_row, self._high_water = keys.copy(), keys.size
        self._by_row[free] = 0
        self._is_live = np.ones(keys.size, np.bool_)
        self._is_live[free] = False
        self._free = free.tolist()
        live: npt.NDArray[Any] = np.flatnonzero(self._is_live).astype(np.int32)
        order = np.argsort(keys[live], kind="stable")
        self._sorted_rows = live[order]
        self._sorted_keys = keys[self._sorted_rows]
        twice = np.flatnonzero(self._sorted_keys[1:] == self._sorted_keys[:-1])
        return int(self._sorted_rows[twice + 1].min()) if twice.size else None
