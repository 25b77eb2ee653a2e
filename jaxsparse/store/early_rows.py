# SPDX-License-Identifier: Apache-2.0
"""Rows that were read from disks before it was certain that they are wanted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from jaxsparse.store.ssd import SegmentStore

Int64s = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]


class EarlyRows:
    """Rows by location on the disks: what lies there never changes, and once it is released
    nobody asks for it."""

    def __init__(
        self,
        locations: Int64s | None = None,
        reading: Future[npt.NDArray[np.uint8]] | None = None,
        disks: SegmentStore | None = None,
    ) -> None:
        """Has none, or those at ``locations`` ``[n]``, ascending, that ``reading`` brings."""
        self._locations = np.zeros(0, np.int64) if locations is None else locations
        self._reading, self._disks = reading, disks

    def find(self, locations: Int64s) -> tuple[npt.NDArray[np.bool_], Callable[[], Words]]:
        """Which of ``locations`` ``[n]`` are here, and what gives their words ``[m, W]``, once
        they are read.

        That raises StoreError where a row which is asked for cannot be read.
        """
        if not self._locations.size:
            return np.zeros(locations.size, bool), lambda: np.zeros((0, 0), np.uint32)
        at = np.searchsorted(self._locations, locations)
        at[at == self._locations.size] = 0
        found = self._locations[at] == locations
        return found, lambda: self._words(at[found])

    def _words(self, at: Int64s) -> Words:
        assert self._reading is not None and self._disks is not None
        if self._reading.exception() is None:
            rows = self._reading.result()[at]
        else:  # of a row, maybe, that is not asked for
            rows = self._disks.read(self._locations[at])
        return rows.view(np.uint32)
