# SPDX-License-Identifier: Apache-2.0
"""Which rows a full table gives up, and which have expired: `jaxsparse.dynamic` on counters."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jaxsparse.dynamic import LFU, TTL, Eviction
from jaxsparse.store.growing import grown

Rows = npt.NDArray[np.int32]

BULK_SHARE = 256
"""A full table gives up one row in so many at least: looking for them costs a pass over all."""

HALF_LIFE_BATCHES = 100
"""Batches without a row after which its occurrences count half when it is decided who stays in
memory. On a Zipf log with 5 % of the rows on the devices and 14 % in memory, 12,500 rows of a pass
of two batches of 106,000 keys are on a disk then; 11,800 at 400, which takes four times as long to
follow a change, and 17,600 by the hotness that decides who is on the devices."""


class Counters:
    """What eviction knows of every row: occurrences, last batch, last time in the data."""

    def __init__(self, with_times: bool) -> None:
        """Starts without rows; times are kept where a policy reads them."""
        self.count = np.zeros(0, np.int32)
        self.last = np.zeros(0, np.int32)
        self.time = np.zeros(0, np.float64) if with_times else None

    @property
    def nbytes(self) -> int:
        """Memory of the counters."""
        times = 0 if self.time is None else self.time.nbytes
        return self.count.nbytes + self.last.nbytes + times

    def grow(self, num_rows: int) -> None:
        """Makes room for rows below ``num_rows``."""
        self.count = grown(self.count, num_rows, 0)
        self.last = grown(self.last, num_rows, 0)
        if self.time is not None:
            self.time = grown(self.time, num_rows, 0)

    def take_in(
        self,
        rows: Rows,
        num_rows: int,
        counts: npt.NDArray[np.int32],
        last: npt.NDArray[np.int32],
        times: npt.NDArray[np.float64] | None,
    ) -> None:
        """Starts with what was known of ``rows`` ``[n]``, all below ``num_rows``."""
        self.grow(num_rows)
        self.count[rows], self.last[rows] = counts, last
        if self.time is not None and times is not None:
            self.time[rows] = times

    def add(self, rows: Rows, counts: npt.NDArray[np.int64], step: int, time: float) -> None:
        """Counts a batch: distinct rows and their occurrences."""
        self.count[rows] += counts.astype(np.int32)
        self.last[rows] = step
        if self.time is not None:
            self.time[rows] = time

    def worth(self, rows: Rows) -> npt.NDArray[np.float32]:
        """How likely rows ``[n]`` are to come back, by their order alone: the logarithm of their
        occurrences, which halve every `HALF_LIFE_BATCHES` without the row. Stays as it is until
        the row occurs."""
        worth = np.log2(1 + self.count[rows], dtype=np.float32)
        worth += self.last[rows] * np.float32(1 / HALF_LIFE_BATCHES)
        return worth

    def forget(self, rows: Rows) -> None:
        """Rows are as new."""
        self.count[rows] = 0


def expired(
    policy: Eviction | None, counters: Counters, rows: Rows, step: int, time: float
) -> Rows:
    """Those of distinct ``rows`` that have expired."""
    if not isinstance(policy, TTL):
        return rows[:0]
    if policy.steps is not None:
        return rows[step - counters.last[rows].astype(np.int64) > policy.steps]
    assert counters.time is not None and policy.seconds is not None
    return rows[time - counters.time[rows] > policy.seconds]


def first_to_go(policy: Eviction, counters: Counters, rows: Rows, need: int, num_rows: int) -> Rows:
    """At least ``need`` of the live ``rows``, in the order in which they go.

    Args:
        policy: of the table.
        counters: of its rows.
        rows: that may go, at least ``need``.
        need: rows wanted.
        num_rows: capacity of the table.
    """
    last = counters.last[rows].astype(np.int64)
    if isinstance(policy, LFU):
        order = (counters.count[rows].astype(np.int64) << 32) | last
    else:
        order = (last << 32) | rows
    count = min(max(need, num_rows // BULK_SHARE), rows.size)
    chosen = np.argpartition(order, count - 1)[:count]
    return rows[chosen[np.argsort(order[chosen], kind="stable")]]
