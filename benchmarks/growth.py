# SPDX-License-Identifier: Apache-2.0
"""How the sparse part grows with each size, here and there: ``python -m benchmarks.growth``.

Each point is prepared in a worker of ours and then in the peer's, which gets the thread count it is
fastest with. Where growth has a limit, two workers of ours hold the two sizes and take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from typing import Any

from benchmarks.bandwidth import copy_bandwidth
from benchmarks.charts import draw_growth
from benchmarks.growth_limits import HOT, limits, linear, tell
from benchmarks.report import (
    RESULTS,
    Result,
    describe_machine,
    grid,
    machine,
    save,
    summary,
)
from benchmarks.turns import QUARTILES, best_threads, quartiles
from benchmarks.workers import Worker, ours, peer
from benchmarks.workload import Workload, bytes_moved, distinct_rows

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
        "26 tables, the same ids",
        "rows of each table",
        _vary("rows", 100_000, 300_000, 1_000_000, id_rows=100_000),
    ),
    "tall": Series(
        "2 tables, the same ids",
        "rows of each table",
        _vary("rows", 100_000, 1_000_000, 10_000_000, tables=2, id_rows=100_000),
    ),
    "bag": Series("bags", "ids of each bag", _vary("bag", 1, 2, 4, 16)),
    "dim": Series("width of rows", "D", _vary("dim", 8, 32, 64, 128, 256)),
    "skew": Series("skew", "Zipf exponent", _vary("zipf", 1.05, 1.2, 1.5, 2.0)),
    "batch": Series("batch", "samples of a batch", _vary("batch", 128, 1024, 4096, 16_384, 65_536)),
    "devices": Series("CPU devices", "devices", tuple((n, BASE) for n in (1, 2, 4)), devices=True),
}

TALLER = ("rows", "tall")
"""Series whose ends are compared in turns."""

STEPS, SECONDS = 20, 0.5
"""Of one turn: whichever ends it first."""
TURNS = 3
"""Of each point of a series."""
ROUNDS = 10
"""Of turns where growth has a limit."""


def _point(worker: Worker, workload: Workload, any_threads: bool = False) -> Result:
    """Quartiles of the steps of a workload; the worker holds nothing afterwards.

    Args:
        worker: of ours or the peer's.
        workload: what it prepares.
        any_threads: whether it runs on as many threads as it is fastest with.
    """
    worker.prepare(workload)
    threads = best_threads(worker, STEPS, SECONDS / 2)[0] if any_threads else None
    times = [ms for _ in range(TURNS) for ms in worker.run(STEPS, SECONDS, threads)]
    worker.ask("release")
    return {**quartiles(times), **({"threads": threads} if threads else {})}


class Points:
    """Measures points; a workload that several series have is measured once."""

    def __init__(self, us: Worker, them: Worker, ends: dict[Workload, Result]) -> None:
        """Takes a worker of ours on one device, the peer's, and what is known of ours."""
        self.us, self.them = us, them
        self.ends = ends
        self.known: dict[Workload, Result] = {}

    def of(self, workload: Workload) -> Result:
        """Both measured, and what the step works on."""
        workload = workload.plain()
        if workload not in self.known:
            distinct = distinct_rows(workload.draw())
            self.known[workload] = {
                "ours": self.ends.get(workload) or _point(self.us, workload),
                "peer": _point(self.them, workload, any_threads=True),
                "num_ids": workload.num_ids,
                "distinct_rows": distinct,
                "bytes": bytes_moved(workload, distinct),
            }
        return self.known[workload]

    def on_devices(self, workload: Workload, devices: int) -> Result:
        """Ours on several CPU devices; the peer knows nothing of them."""
        with ours(devices=devices) as alone:
            return {**self.of(workload), "ours": _point(alone, workload)}

    def series(self, series: Series) -> list[Result]:
        """Every point of a series."""
        return [
            {
                "size": size,
                **(
                    self.on_devices(workload, int(size))
                    if series.devices and size > 1
                    else self.of(workload)
                ),
            }
            for size, workload in series.points
        ]


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
    ends = {name: (series[name].points[0][1], series[name].points[-1][1]) for name in TALLER}
    limited, required = limits(ends, hot, rounds)
    known = {
        workload.plain(): {key: limited[name][size][key] for key in QUARTILES}
        for name, pair in ends.items()
        for size, workload in zip(("small", "large"), pair, strict=True)
    }
    told = {}
    with ours() as us, peer() as them:
        points = Points(us, them, known)
        for name, one in series.items():
            tell(f"{name}: {', '.join(f'{size:,}' for size, _ in one.points)}")
            told[name] = {"title": one.title, "axis": one.axis, "points": points.series(one)}
    linears = [
        linear(name, told[name]["points"], BASE.num_ids)
        for name in ("bag", "batch")
        if name in told
    ]
    return {
        "benchmark": "growth",
        "machine": machine(),
        "copy_bandwidth": copy_bandwidth(),
        "workload": BASE.as_dict(),
        "series": told,
        "limits": limited,
        "requirements": [*required, *linears],
    }


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
