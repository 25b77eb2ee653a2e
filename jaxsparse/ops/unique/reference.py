# SPDX-License-Identifier: Apache-2.0
"""What `unique` means."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]


def unique_reference(rows: Int32s, num_rows: int) -> tuple[Int32s, Int32s, Int32s]:
    """Groups equal rows; see `jaxsparse.ops.unique.unique`.

    >>> [part.tolist() for part in unique_reference(np.int32([7, 9, 2, 7]), 9)]
    [[2, 7, 9, 9], [2, 0, 3, 1], [0, 1, 3, 3, 3]]
    """
    size = len(rows)
    places: dict[int, list[int]] = {}
    nowhere = []
    for place, row in enumerate(rows.tolist()):
        if 0 <= row < num_rows:
            places.setdefault(row, []).append(place)
        else:
            nowhere.append(place)
    found = sorted(places)
    distinct = np.full(size, num_rows, np.int32)
    distinct[: len(found)] = found
    order = [place for row in found for place in places[row]]
    offsets = np.full(size + 1, len(order), np.int32)
    offsets[: len(found) + 1] = np.cumsum([0, *(len(places[row]) for row in found)])
    return distinct, np.array(order + nowhere, np.int32), offsets
