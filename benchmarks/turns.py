# SPDX-License-Identifier: Apache-2.0
"""Times of several workers that take turns, so that what else the machine does falls on all."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.workers import Worker

MAX_SPREAD = 0.2
"""Interquartile range over median above which turns are taken again."""
ATTEMPTS = 3
QUARTILES = ("lower", "median", "upper", "spread")
"""What `quartiles` tells."""

Turn = Callable[[], list[float]]
"""Runs a worker for a while; milliseconds of each step."""


def quartiles(values: list[float]) -> dict[str, Any]:
    """Lower quartile, median, upper quartile and the spread they have.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    {'lower': 2.0, 'median': 3.0, 'upper': 4.0, 'spread': 0.6666666666666666}
    """
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return {"lower": lower, "median": median, "upper": upper, "spread": (upper - lower) / median}


def take_turns(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[float]]:
    """The median step of each turn, in ms; the order alternates from round to round."""
    medians: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds):
        for name in list(turns)[:: 1 if number % 2 == 0 else -1]:
            medians[name].append(statistics.median(turns[name]()))
    return medians


def steady_turns(turns: Mapping[str, Turn], rounds: int) -> dict[str, dict[str, Any]]:
    """Turns until every one's interquartile range is within `MAX_SPREAD`, or attempts are used up.

    Returns:
        By name the `quartiles`, ``ms`` of every turn, ``attempts``, and whether it was ``steady``.
    """
    best: dict[str, dict[str, Any]] = {}
    attempts = 0
    while attempts < ATTEMPTS and (not best or _worst(best) > MAX_SPREAD):
        attempts += 1
        taken = take_turns(turns, rounds)
        told = {name: {**quartiles(ms), "ms": ms} for name, ms in taken.items()}
        if not best or _worst(told) < _worst(best):
            best = told
    is_steady = _worst(best) <= MAX_SPREAD
    return {name: {**one, "attempts": attempts, "steady": is_steady} for name, one in best.items()}


def best_threads(worker: Worker, steps: int, seconds: float) -> tuple[int, dict[int, float]]:
    """The thread count that a prepared worker is fastest with, and milliseconds of each count.

    Every count up to that of the cores has two turns, of which the faster counts.
    """
    counts = range(1, len(os.sched_getaffinity(0)) + 1)
    least: dict[int, float] = {}
    for _ in range(2):
        for count in counts:
            step_ms = statistics.median(worker.run(steps, seconds, count))
            least[count] = min(step_ms, least.get(count, step_ms))
    return min(least, key=lambda count: least[count]), least


def _worst(told: Mapping[str, Mapping[str, Any]]) -> float:
    return max(one["spread"] for one in told.values())
