# SPDX-License-Identifier: Apache-2.0
"""Rows of one table in the host's memory: one array, whose pages come as they are written."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

from jaxsparse.store.growing import grown
from jaxsparse.store.row_copy import copy_rows

Rows = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint32]

NOWHERE = -1
"""Slot of a row that is not here."""

EMPTY = -1
"""Row of a slot that holds none."""


class RamRows:
    """Up to ``num_slots`` rows of ``num_words`` words."""

    def __init__(self, num_slots: int, num_words: int) -> None:
        """Reserves addresses; memory is taken as slots are used, low ones first."""
        self.num_words = num_words
        self._words = _reserve(num_slots, num_words)
        self.slot = np.zeros(0, np.int32)
        self._row_at = np.zeros(0, np.int32)
        self._free = np.zeros(0, np.int32)
        self._num_free = self._high_water = 0

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        arrays = self.slot.nbytes + self._row_at.nbytes + self._free.nbytes
        return self._high_water * self.num_words * 4 + arrays

    def __len__(self) -> int:
        """Rows here."""
        return self._high_water - self._num_free

    def rows(self) -> Rows:
        """All rows here."""
        return self._row_at[self.slots()]

    def slots(self) -> npt.NDArray[np.int64]:
        """Slots of all rows here, in the order of `rows`."""
        return np.flatnonzero(self._row_at[: self._high_water] != EMPTY)

    def rows_at(self, slots: npt.NDArray[np.int64]) -> Rows:
        """Rows ``[n]`` in slots."""
        return self._row_at[slots]

    def holds(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of rows ``[n]`` are here."""
        self.slot = grown(self.slot, int(rows.max(initial=-1)) + 1, NOWHERE)
        found: npt.NDArray[np.bool_] = self.slot[rows] != NOWHERE
        return found

    def read(self, rows: Rows) -> Words:
        """Words ``[n, W]`` of rows that are here."""
        words = np.empty((rows.size, self.num_words), np.uint32)
        copy_rows(words, None, self._words, self.slot[rows])
        return words

    def read_into(self, rows: Rows, out: Words, places: npt.NDArray[np.int64]) -> None:
        """As `read`, into the rows ``places`` ``[n]`` of ``out``."""
        copy_rows(out, places, self._words, self.slot[rows])

    def write(self, rows: Rows, words: Words, places: npt.NDArray[np.int64] | None = None) -> None:
        """Puts distinct rows here, over what they were where they are; they have to fit.

        Args:
            rows: ``[n]``.
            words: ``[m, W]``.
            places: ``[n]`` where in ``words`` each lies; None is in their order.
        """
        here = self.holds(rows)
        fresh = rows[~here]
        reused = min(fresh.size, self._num_free)
        slots = np.empty(fresh.size, np.int32)
        slots[:reused] = self._free[self._num_free - reused : self._num_free]
        self._num_free -= reused
        first, more = self._high_water, fresh.size - reused
        slots[reused:] = np.arange(first, first + more, dtype=np.int32)
        self._high_water += more
        self._row_at = grown(self._row_at, self._high_water, EMPTY)
        self.slot[fresh], self._row_at[slots] = slots, fresh
        copy_rows(self._words, self.slot[rows], words, places)

    def drop(self, rows: Rows) -> None:
        """Rows ``[n]``, distinct, are no longer here; those that were not stay so."""
        slots = self.slot[rows[self.holds(rows)]]
        self.slot[rows] = NOWHERE
        self._row_at[slots] = EMPTY
        self._free = grown(self._free, self._num_free + slots.size, 0)
        self._free[self._num_free : self._num_free + slots.size] = slots
        self._num_free += slots.size


def _reserve(num_slots: int, num_words: int) -> Words:
    """An array whose memory is only taken where it is written."""
    num_bytes = max(num_slots * num_words * 4, 1)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    block = mmap.mmap(-1, num_bytes, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Rows lie anywhere: with small pages a fault or a missed translation costs more than a row.
        with contextlib.suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    words: Words = np.frombuffer(block, np.uint32, num_slots * num_words)
    return words.reshape(num_slots, num_words)
