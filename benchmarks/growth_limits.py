# SPDX-License-Identifier: Apache-2.0
"""Growth that has a limit: two sizes are held by two workers of ours, which take turns."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from functools import partial

from benchmarks.report import Result, requirement
from benchmarks.turns import steady_turns
from benchmarks.workers import Worker, ours
from benchmarks.workload import Workload, state_bytes

MOST_GROWTH = 1.3
"""Time of the step on many rows over that on few."""
MOST_PER_ID = 1.3
"""Time of an id among many over that among few: linear, with room for noise."""
MOST_HOT = 1.5
"""Time of a bag of equal ids over one of distinct ids."""
MOST_RESIDENT = 1.15
"""Resident memory over weights and slots, the compiled step's temporaries left out."""
HOT = Workload(tables=1, rows=1_000_000, batch=1, bag=100_000, ids="equal", num_batches=4)

STEPS, SECONDS = 15, 0.3
"""Of one turn: whichever ends it first."""


@contextlib.contextmanager
def _held(*workloads: Workload) -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(ours()) for _ in workloads]
        for worker, workload in zip(workers, workloads, strict=True):
            worker.prepare(workload)
        yield workers


def ratio(small: Workload, large: Workload, rounds: int) -> tuple[Result, dict[str, Result]]:
    """Lower quartile of the large one over that of the small one, in turns; memory of both."""
    with _held(small, large) as workers:
        held = dict(zip(("small", "large"), workers, strict=True))
        turns = {name: partial(worker.run, STEPS, SECONDS) for name, worker in held.items()}
        told = steady_turns(turns, rounds)
        state = {"small": state_bytes(small), "large": state_bytes(large)}
        memory = {
            name: {**worker.ask("memory"), "state_bytes": state[name]}
            for name, worker in held.items()
        }
    return {**told, "ratio": told["large"]["lower"] / told["small"]["lower"]}, memory


def resident_share(memory: Result) -> float:
    """Resident memory over weights and slots.

    Temporaries of the compiled step are left out, and what was resident before the tables were
    made.
    """
    held = memory["resident_bytes"] - memory["base_bytes"] - memory["temporary_bytes"]
    share: float = held / memory["state_bytes"]
    return share


def limits(
    ends: dict[str, tuple[Workload, Workload]], hot: Workload, rounds: int
) -> tuple[Result, list[Result]]:
    """What has a limit, measured, and whether it is kept.

    Args:
        ends: by name the same step on few and on many rows.
        hot: the bag of equal ids.
        rounds: turns.
    """
    told: Result = {}
    required = []
    for name, (small, large) in ends.items():
        tell(f"{name}, {small.rows:,} and {large.rows:,} rows in turns")
        told[name], memory = ratio(small, large, rounds)
        told[name]["memory"] = memory
        tables = f"{large.tables} tables of {large.rows:,} rows"
        required += [
            _at_most(
                f"{tables}: time over that of {small.rows:,}", told[name]["ratio"], MOST_GROWTH
            ),
            _at_most(
                f"{tables}: resident over weights and slots",
                resident_share(memory["large"]),
                MOST_RESIDENT,
            ),
        ]
    tell(f"bags of {hot.bag:,} equal and distinct ids in turns")
    told["hot"], _ = ratio(dataclasses.replace(hot, ids="distinct"), hot, rounds)
    what = f"a bag of {hot.bag:,} equal ids: time over that of distinct ones"
    return told, [*required, _at_most(what, told["hot"]["ratio"], MOST_HOT)]


def linear(series: str, points: list[Result], least_ids: int) -> Result:
    """Whether an id takes no longer at the last point than at the first one of enough ids.

    With few ids a step is the fixed cost of its programs.
    """
    enough = [point for point in points if point["num_ids"] >= least_ids] or points
    first, last = enough[0], enough[-1]
    growth = last["ours"]["lower"] / first["ours"]["lower"]
    ids = last["num_ids"] / first["num_ids"]
    what = f"{series}: time of an id, {last['num_ids']:,} ids over {first['num_ids']:,}"
    return _at_most(what, growth / ids, MOST_PER_ID)


def _at_most(what: str, got: float, limit: float) -> Result:
    return requirement(what, got, limit, at_least=False)


def tell(what: str) -> None:
    """Says on stderr what is measured now."""
    print(f"growth: {what}", file=sys.stderr)
