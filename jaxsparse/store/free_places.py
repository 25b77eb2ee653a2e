# SPDX-License-Identifier: Apache-2.0
"""Places on the devices that hold no row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


class FreePlaces:
    """A stack of places; a new one gives low ones first."""

    def __init__(self, places: npt.NDArray[np.integer[Any]], is_free: Mask | None = None) -> None:
        """Some of ``places`` ``[n]``, ascending, are free; None for all."""
        free = places if is_free is None else places[is_free]
        self._places = np.empty(places.size, np.int32)
        self._num = free.size
        self._places[: self._num] = free[::-1]

    def __len__(self) -> int:
        """Places that are free."""
        return self._num

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return self._places.nbytes

    def take(self, count: int) -> Places:
        """``count`` places, no longer free."""
        taken = self._places[self._num - count : self._num][::-1].copy()
        self._num -= count
        return taken

    def give_back(self, places: Places) -> None:
        """Places are free again."""
        self._places[self._num : self._num + places.size] = places
        self._num += places.size

    def tidy(self) -> None:
        """Low places are given first again."""
        self._places[: self._num] = np.sort(self._places[: self._num])[::-1]
