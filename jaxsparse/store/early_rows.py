# SPDX-License-Identifier: Apache-2.0
"""Rows that were read from disks before it was certain that they are wanted."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from jaxsparse.store.row_copy import copy_rows
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

    def find(self, locations: Int64s) -> tuple[npt.NDArray[np.bool_], Int64s]:
        """Which of ``locations`` ``[n]`` are here, and for `copy` where ``[m]``."""
        if not self._locations.size:
            return np.zeros(locations.size, bool), np.zeros(0, np.int64)
        at = np.searchsorted(self._locations, locations)
        at[at == self._locations.size] = 0
        found = self._locations[at] == locations
        return found, at[found]

    def copy(self, at: Int64s, out: Words, places: Int64s) -> None:
        """Puts rows into the rows ``places`` of ``out``, once they are read.

        Raises:
            StoreError: one of them cannot be read.
        """
        assert self._reading is not None and self._disks is not None
        if self._reading.exception() is None:
            copy_rows(out, places, self._reading.result().view(np.uint32), at)
        else:  # of a row, maybe, that nobody asks for
            rows = self._disks.read(self._locations[at])
            copy_rows(out, places, rows.view(np.uint32), None)
