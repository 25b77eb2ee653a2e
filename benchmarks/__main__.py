# SPDX-License-Identifier: Apache-2.0
"""All measurements of the step and of the key index, one after the other: ``make bench``.

Results and charts go to ``benchmarks/results``. Ends with 1 where a required figure is not reached.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Callable

from benchmarks import ablation, against_peers, growth, index, ops
from benchmarks.charts import draw_growth
from benchmarks.report import RESULTS, Result, save, summary
from benchmarks.workers import WorkerError, peer

MEASURES: dict[str, tuple[Callable[[], Result], Callable[[Result], str]]] = {
    "against_peers": (against_peers.measure, against_peers.table),
    "growth": (growth.measure, growth.table),
    "ops": (ops.measure, ops.table),
    "ablation": (ablation.measure, ablation.table),
    "index": (index.measure, index.table),
}


def main() -> int:
    """Measures; 1 where something required is not met, 2 where there is no peer."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="All measurements.")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    parser.add_argument("only", nargs="*", choices=[*MEASURES, []], help="default: all")
    options = parser.parse_args()
    try:
        check_peer()
    except WorkerError as error:
        print(error, file=sys.stderr)
        return 2
    requirements: list[Result] = []
    for name in options.only or MEASURES:
        start = time.perf_counter()
        measure, table = MEASURES[name]
        result = measure()
        save(result, options.out / f"{name}.json")
        if name == "growth":
            draw_growth(result, options.out / "growth.png")
        requirements += result.get("requirements", [])
        print(f"== {name}, {time.perf_counter() - start:.0f} s ==\n{table(result)}\n", flush=True)
    print(f"== required figures ==\n{summary(requirements)}")
    return 0 if all(one["met"] for one in requirements) else 1


def check_peer() -> None:
    """Raises `WorkerError` where the peer is not installed, before anything is measured."""
    with peer() as worker:
        worker.ask("check")


if __name__ == "__main__":
    sys.exit(main())
