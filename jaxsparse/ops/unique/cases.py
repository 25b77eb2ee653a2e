# SPDX-License-Identifier: Apache-2.0
"""Rows that `unique` is tested and timed on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Draw = Callable[[np.random.Generator, int, int], npt.NDArray[np.int64]]


def _uniform(rng: np.random.Generator, size: int, num_rows: int) -> npt.NDArray[np.int64]:
    return rng.integers(0, num_rows, size)


def _padded(rng: np.random.Generator, size: int, num_rows: int) -> npt.NDArray[np.int64]:
    """As owners are asked: ascending runs, each padded with R."""
    runs = [np.sort(_uniform(rng, size // 4, num_rows)) for _ in range(3)]
    return np.append(np.concatenate(runs), np.full(size - 3 * (size // 4), num_rows))


def _outside(rng: np.random.Generator, size: int, num_rows: int) -> npt.NDArray[np.int64]:
    return rng.integers(-3, num_rows + 3, size)


def _equal(rng: np.random.Generator, size: int, num_rows: int) -> npt.NDArray[np.int64]:
    return np.full(size, rng.integers(num_rows))


def _zipf(rng: np.random.Generator, size: int, num_rows: int) -> npt.NDArray[np.int64]:
    return np.minimum(rng.zipf(1.2, size), num_rows) - 1


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of one call."""

    name: str
    size: int
    """N."""
    num_rows: int
    """R."""
    draw: Draw

    def rows(self, seed: int = 0) -> npt.NDArray[np.int32]:
        """``[N]`` int32."""
        drawn = self.draw(np.random.default_rng(seed), self.size, self.num_rows)
        return drawn.astype(np.int32)


CASES = (
    Case("empty", 0, 5, _uniform),
    Case("one", 1, 1, _uniform),
    Case("few", 40, 7, _uniform),
    Case("outside", 300, 50, _outside),
    Case("all_equal", 1_000, 90_000, _equal),
    Case("padded_runs", 1_000, 3_000, _padded),
    Case("all_padding", 200, 10, lambda rng, size, num_rows: np.full(size, num_rows)),
    Case("three_digits", 1_000, 2**31 - 2, _uniform),
    Case("skewed", 5_000, 100_000, _zipf),
)
"""Small enough for tests."""

TIMED = (
    Case("zipf_106k", 106_496, 2_600_000, _zipf),
    Case("uniform_106k", 106_496, 2_600_000, _uniform),
)
"""A batch of 4096 samples with 26 ids each."""
