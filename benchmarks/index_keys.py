# SPDX-License-Identifier: Apache-2.0
"""Keys for the measurements of the index: different ones, by number."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def distinct_keys(series: int, begin: int, end: int) -> npt.NDArray[np.uint64]:
    """Keys ``begin .. end - 1`` of a series: no two are equal, in it or in another one.

    SplitMix64 (Steele, Lea, Flood 2014), a bijection, of numbers that are all different.

    Args:
        series: below 2^16.
        begin: number of the first key, below 2^48.
        end: behind that of the last.
    """
    key = np.arange(begin, end, dtype=np.uint64) | np.uint64(series << 48)
    key = key * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        key = (key ^ (key >> np.uint64(shift))) * np.uint64(factor)
    return key ^ (key >> np.uint64(31))
