# SPDX-License-Identifier: Apache-2.0
"""How the sparse part grows with each size, here and there: ``python -m benchmarks.growth``.

Each point is prepared afresh in a worker, ours and then the peer's. Where growth has a limit, the
two sizes are held by two workers of ours that take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.charts import draw_growth
from benchmarks.report import (
    RESULTS,
    Result,
    describe_machine,
    grid,
    machine,
    requirement,
    save,
    summary,
)
from benchmarks.turns import quartiles, steady_turns
from benchmarks.workers import Worker, ours, peer
from benchmarks.workload import Workload, bytes_moved, distinct_rows, state_bytes

BASE = Workload()


@dataclasses.dataclass(frozen=True)
class Series:
    """One size that grows while all else stays."""

    title: str
    axis: str
    points: tuple[tuple[float, Workload], ...]
    """Size, and the workload of that size."""
    devices: bool = False
    """Whether the size is the number of CPU devices, which the peer knows nothing of."""


def _vary(field: str, *values: Any, **fixed: Any) -> tuple[tuple[float, Workload], ...]:
    base = dataclasses.replace(BASE, **fixed)
    return tuple((value, dataclasses.replace(base, **{field: value})) for value in values)


SERIES = {
    "rows": Series(
        "26 tables, same ids",
        "rows of each table",
        _vary("rows", 100_000, 300_000, 1_000_000, id_rows=100_000),
    ),
    "tall": Series(
        "2 tables, same ids",
        "rows of each table",
        _vary("rows", 100_000, 1_000_000, 10_000_000, tables=2, id_rows=100_000),
    ),
    "bag": Series("ids of a bag", "ids of each bag", _vary("bag", 1, 2, 4, 8, 16)),
    "dim": Series("width", "dim", _vary("dim", 8, 16, 32, 64, 128, 256)),
    "skew": Series("skew", "Zipf exponent", _vary("zipf", 1.05, 1.2, 1.5, 2.0, 3.0)),
    "batch": Series(
        "batch", "samples of a batch", _vary("batch", 128, 512, 2048, 8192, 32768, 65536)
    ),
    "devices": Series("CPU devices", "devices", tuple((n, BASE) for n in (1, 2, 4)), devices=True),
}

MOST_GROWTH = 1.3
"""Of the step, over the rows of "rows" and of "tall"."""
MOST_PER_ID = 1.3
"""Time of an id at the largest bags over that at the smallest: linear, with room for noise."""
MOST_HOT = 1.5
"""Time of a bag of equal ids over one of distinct ids."""
MOST_RESIDENT = 1.15
"""Resident memory over weights and slots, the compiled step's temporaries left out."""
HOT = Workload(tables=1, rows=1_000_000, batch=1, bag=100_000, ids="equal", num_batches=4)

STEPS, SECONDS = 20, 0.5
"""Of one turn: whichever ends it first."""
TURNS = 3
"""Of each point of a series."""
ROUNDS = 10
"""Of turns where growth has a limit."""


def _point(worker: Worker, workload: Workload) -> dict[str, Any]:
    """Quartiles of the steps of a workload; the worker holds nothing afterwards."""
    worker.prepare(workload)
    times = [ms for _ in range(TURNS) for ms in worker.run(STEPS, SECONDS)]
    worker.ask("release")
    return quartiles(times)


def measure_series(series: Series, peer_worker: Worker | None) -> list[Result]:
    """Every point of a series."""
    points = []
    with contextlib.ExitStack() as stack:
        us = None if series.devices else stack.enter_context(ours())
        for size, workload in series.points:
            if series.devices:
                with ours(devices=int(size)) as alone:
                    point = {"size": size, "ours": _point(alone, workload)}
            else:
                assert us is not None
                point = {"size": size, "ours": _point(us, workload)}
            if peer_worker is not None and not (series.devices and points):
                point["peer"] = _point(peer_worker, workload)
            distinct = distinct_rows(workload.draw())
            point |= {
                "num_ids": workload.num_ids,
                "distinct_rows": distinct,
                "bytes": bytes_moved(workload, distinct),
            }
            points.append(point)
    return points


@contextlib.contextmanager
def _held(*workloads: Workload) -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(ours()) for _ in workloads]
        for worker, workload in zip(workers, workloads, strict=True):
            worker.prepare(workload)
        yield workers


def ratio(small: Workload, large: Workload, rounds: int) -> tuple[Result, list[Result]]:
    """Lower quartile of the large one over that of the small one, in turns; memory of both."""
    with _held(small, large) as workers:
        turns = {
            name: partial(worker.run, STEPS, SECONDS)
            for name, worker in zip(("small", "large"), workers, strict=True)
        }
        told = steady_turns(turns, rounds)
        memory = [
            {**worker.ask("memory"), "state_bytes": state_bytes(workload)}
            for worker, workload in zip(workers, (small, large), strict=True)
        ]
    return {**told, "ratio": told["large"]["lower"] / told["small"]["lower"]}, memory


def resident_share(memory: Result) -> float:
    """Resident memory beyond temporaries over weights and slots; the interpreter's own,
    measured before the tables were made, is left out."""
    held = memory["resident_bytes"] - memory["base_bytes"] - memory["temporary_bytes"]
    share: float = held / memory["state_bytes"]
    return share


def limits(series: dict[str, Series], hot: Workload, rounds: int) -> tuple[Result, list[Result]]:
    """What has a limit, measured, and whether it is kept."""
    told: Result = {}
    required = []
    for name in ("rows", "tall"):
        (small, first), (large, last) = series[name].points[0], series[name].points[-1]
        _tell(f"{name}, {small:,g} and {large:,g} in turns")
        told[name], told[f"{name}_memory"] = ratio(first, last, rounds)
        tables = first.tables
        required.append(
            requirement(
                f"{tables} tables of {small:,g} to {large:,g} rows: growth of the step",
                told[name]["ratio"],
                MOST_GROWTH,
                at_least=False,
            )
        )
        required.append(
            requirement(
                f"{tables} tables of {large:,g} rows: resident over weights and slots",
                resident_share(told[f"{name}_memory"][1]),
                MOST_RESIDENT,
                at_least=False,
            )
        )
    _tell("a bag of equal and one of distinct ids in turns")
    told["hot"], _ = ratio(dataclasses.replace(hot, ids="distinct"), hot, rounds)
    required.append(
        requirement(
            f"a bag of {hot.bag:,} equal ids over distinct ones",
            told["hot"]["ratio"],
            MOST_HOT,
            at_least=False,
        )
    )
    return told, required


def per_id(points: list[Result]) -> float:
    """Time of an id at the last point over that at the first."""
    first, last = points[0], points[-1]
    growth: float = last["ours"]["lower"] / first["ours"]["lower"]
    return growth / (last["num_ids"] / first["num_ids"])


def measure(
    rounds: int = ROUNDS, series: dict[str, Series] | None = None, hot: Workload = HOT
) -> Result:
    """All series, and what has a limit.

    Args:
        rounds: turns of what has a limit.
        series: those of `SERIES`; smaller ones are for tests.
        hot: the bag of equal ids.
    """
    series = series or SERIES
    told = {}
    with peer() as peer_worker:
        for name, one in series.items():
            _tell(f"{name}: {', '.join(f'{size:,g}' for size, _ in one.points)}")
            told[name] = {
                "title": one.title,
                "axis": one.axis,
                "points": measure_series(one, peer_worker),
            }
    limited, required = limits(series, hot, rounds)
    linear = requirement(
        "time of an id, largest bags over single ids",
        per_id(told["bag"]["points"]),
        MOST_PER_ID,
        at_least=False,
    )
    return {
        "benchmark": "growth",
        "machine": machine(),
        "workload": BASE.as_dict(),
        "series": told,
        "limits": limited,
        "requirements": [*required, linear],
    }


def _tell(what: str) -> None:
    print(f"growth: {what}", file=sys.stderr)


def table(result: Result) -> str:
    """The result for people."""
    lines = [f"{describe_machine(result)}; ms of the sparse step, lower quartiles"]
    for one in result["series"].values():
        rows = [[one["axis"], "ids", "distinct", "ours", "peer"]]
        for point in one["points"]:
            peers = f"{point['peer']['lower']:.2f}" if "peer" in point else ""
            counts = [f"{point[key]:,}" for key in ("num_ids", "distinct_rows")]
            rows.append([f"{point['size']:,g}", *counts, f"{point['ours']['lower']:.2f}", peers])
        lines += [one["title"], grid(rows)]
    return "\n".join([*lines, summary(result["requirements"])])


def main() -> Result:
    """Measures, prints and keeps the result and its charts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns; at least 10 to quote")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "growth.json")
    options = parser.parse_args()
    result = measure(options.rounds)
    save(result, options.out)
    draw_growth(result, options.out.with_suffix(".png"))
    print(table(result))
    return result


if __name__ == "__main__":
    main()
