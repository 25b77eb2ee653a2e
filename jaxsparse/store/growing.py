# SPDX-License-Identifier: Apache-2.0
"""Arrays with an entry a row, which grow as rows are handed out."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T", bound=np.generic)

GROWTH = 1.3
"""Factor by which an array that is too short grows."""

MIN_LENGTH = 1024
"""Entries of the first array that is not empty."""


def grown(array: npt.NDArray[T], length: int, fill: Any) -> npt.NDArray[T]:
    """``array``, or a longer copy of it where it has fewer than ``length`` entries.

    New entries are ``fill``.
    """
    if length <= array.size:
        return array
    longer = np.full(max(int(array.size * GROWTH), length, MIN_LENGTH), fill, array.dtype)
    longer[: array.size] = array
    return longer
