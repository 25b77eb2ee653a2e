# SPDX-License-Identifier: Apache-2.0
"""The machine's copy bandwidth, which bounds how fast rows can move."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

COPIED_BYTES = 256 << 20
"""Many times any cache."""
REPEATS = 8


def copy_bandwidth(num_bytes: int = COPIED_BYTES, repeats: int = REPEATS) -> float:
    """Bytes read and written per second by plain copies, one thread a core; the best of repeats."""
    cores = len(os.sched_getaffinity(0))
    source = np.ones(num_bytes // 8, np.int64)
    target = np.zeros_like(source)
    parts = list(zip(np.array_split(target, cores), np.array_split(source, cores), strict=True))
    best = float("inf")
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(lambda part: np.copyto(*part), parts))
            best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best
