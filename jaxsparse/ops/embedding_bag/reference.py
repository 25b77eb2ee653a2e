# SPDX-License-Identifier: Apache-2.0
"""What `embedding_bag` means, in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt


def embedding_bag_reference(
    table: npt.NDArray[Any],
    rows: npt.NDArray[np.int32] | None,
    slots: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int32] | None = None,
    weights: npt.NDArray[np.float32] | None = None,
    scale: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float64]:
    """Sums rows of a table by bag: ``scale[o] * sum(weights[i] * table[rows[slots[i]]])``.

    Args:
        table: ``[R, D]`` float32 or bfloat16.
        rows: ``[K]`` row of each slot; None where slots are rows. A row outside ``[0, R)`` is 0.
        slots: ``[M]`` of each id; a slot outside ``[0, K)`` is 0.
        offsets: ``[O + 1]`` ascending: ids ``offsets[o] .. offsets[o + 1]`` are bag o. None where
            id o is bag o. Ids after the last bag count nowhere.
        weights: ``[M]`` by id; None means 1.
        scale: ``[O]`` by bag; None means 1.

    Returns:
        ``[O, D]`` float64.
    """
    if offsets is None:
        offsets = np.arange(slots.size + 1, dtype=np.int32)
    sums = np.zeros((offsets.size - 1, table.shape[1]))
    for bag, (start, stop) in enumerate(pairwise(offsets.tolist())):
        for index in range(start, stop):
            row = int(slots[index])
            if rows is not None:
                row = int(rows[row]) if 0 <= row < rows.size else -1
            if 0 <= row < table.shape[0]:
                weight = 1.0 if weights is None else float(weights[index])
                sums[bag] += weight * table[row].astype(np.float64)
        if scale is not None:
            sums[bag] *= float(scale[bag])
    return sums
