# SPDX-License-Identifier: Apache-2.0
"""Static sizes for batches of varying need: buckets of ids and rungs of exchange capacity.

Every size differs from the next by a factor of at most 1.25, so a buffer is at most a quarter
larger than what it holds, and a run of batches meets few sizes, hence few compiled programs.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from functools import lru_cache

FACTOR = 1.25
"""Ratio of neighbouring sizes."""

HEADROOM = 1.05
"""Factor on the need that a `Ladder` reserves when it changes rungs: needs vary by 2-6 %."""

HEADROOM_DEVIATIONS = 2.0
"""Reserved besides, in square roots of the need: that is how much small counts vary."""

SLACK_BATCHES = 256
"""Batches in a row that must fit two rungs lower before a `Ladder` steps down."""


@lru_cache(maxsize=1)
def _buckets() -> tuple[int, ...]:
    sizes = [1]
    while sizes[-1] < 2**31:
        sizes.append(max(sizes[-1] + 1, int(sizes[-1] * FACTOR)))
    return tuple(sizes)


def bucket(count: int) -> int:
    """Smallest bucket that holds ``count`` ids; 0 for none.

    >>> [bucket(n) for n in (0, 1, 7, 9, 1000)]
    [0, 1, 7, 10, 1113]
    """
    return 0 if count == 0 else _buckets()[bisect_left(_buckets(), count)]


@lru_cache(maxsize=1024)
def rungs(top: int) -> tuple[int, ...]:
    """Capacities below the local id count ``top``, ascending; ``top`` is the last.

    >>> rungs(10)
    (1, 2, 3, 4, 5, 6, 7, 8, 10)
    """
    sizes = [max(top, 1)]
    while sizes[-1] > 1:
        sizes.append(min(sizes[-1] - 1, -int(-sizes[-1] // FACTOR)))
    return tuple(reversed(sizes))


def rung(need: float, top: int) -> int:
    """Smallest capacity of `rungs` that holds ``need`` rows.

    >>> rung(9, 100)
    9
    """
    sizes = rungs(top)
    return sizes[min(bisect_left(sizes, need), len(sizes) - 1)]


@dataclasses.dataclass(frozen=True)
class SlabNeed:
    """What one slab of one batch needs, the largest over devices."""

    fixed_ids: int
    """Ids per device of features with a fixed number of ids per sample."""
    ragged_ids: int
    """Ids per device of the other features."""
    rows: int
    """Distinct rows per (source, owner)."""


@dataclasses.dataclass(frozen=True)
class SlabShape:
    """Static sizes chosen for one slab of one batch."""

    ragged_ids: int
    """Length of the ragged id buffer per device."""
    capacity: int
    """Rows per (source, owner)."""


def smallest_shape(need: SlabNeed) -> SlabShape:
    """The tightest bucket and rung."""
    ragged = bucket(need.ragged_ids)
    return SlabShape(ragged, rung(need.rows, need.fixed_ids + ragged))


class Ladder:
    """Remembers sizes over a run, so that few programs serve it.

    A slab stays on its id bucket while the batch fills at least 1 / 1.25 of it, and on its rung
    until the need exceeds it or has been far below it for long. Any choice is exact; the class
    decides only how often a program is compiled. Not thread-safe.
    """

    def __init__(self) -> None:
        """Starts with nothing remembered."""
        self._ragged: dict[int, int] = {}
        self._capacity: dict[tuple[int, int, int], int] = {}
        self._slack: dict[tuple[int, int, int], int] = {}

    def shapes(self, needs: tuple[SlabNeed, ...]) -> tuple[SlabShape, ...]:
        """Sizes for one batch, by slab."""
        return tuple(self._shape(slab, need) for slab, need in enumerate(needs))

    def _shape(self, slab: int, need: SlabNeed) -> SlabShape:
        ragged = self._ragged.get(slab, -1)
        if not need.ragged_ids <= ragged <= FACTOR * need.ragged_ids:
            ragged = bucket(need.ragged_ids)
        self._ragged[slab] = ragged
        wanted = _roomy_rung(need, ragged)
        key = (slab, need.fixed_ids, ragged)
        capacity = self._capacity.get(key, 0)
        slack = self._slack.get(key, 0) + 1 if wanted * FACTOR**2 < capacity else 0
        if need.rows > capacity or capacity == 0 or slack > SLACK_BATCHES:
            capacity, slack = wanted, 0
        self._capacity[key], self._slack[key] = capacity, slack
        return SlabShape(ragged, capacity)


def _roomy_rung(need: SlabNeed, ragged_ids: int) -> int:
    """The rung that batches like this one will need when they fill the id buffer."""
    top = need.fixed_ids + ragged_ids
    rows = need.rows * top / max(need.fixed_ids + need.ragged_ids, 1)
    return rung(rows * HEADROOM + HEADROOM_DEVIATIONS * rows**0.5, top)
