# SPDX-License-Identifier: Apache-2.0
"""All measurements of the step, of the key index and of the row store, one after the other:
``make bench``.

Results and charts go to ``benchmarks/results``. Ends with 1 where a required figure is not reached.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks import ablation, against_peers, growth, index, ops, ssd, tiers
from benchmarks.charts import draw_growth
from benchmarks.report import RESULTS, Result, save, summary
from benchmarks.tier_chart import draw_tiers
from benchmarks.workers import WorkerError, peer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure:
    """A measurement, and what is made of its result."""

    measure: Callable[..., Result]
    """Takes ``folder`` where it is `on_disk`, else nothing."""
    table: Callable[[Result], str]
    """The result for people."""
    draw: Callable[[Result, pathlib.Path], None] | None = None
    """A chart of the result, as PNG."""
    has_peer: bool = False
    """Whether FBGEMM and PyTorch are timed too."""
    on_disk: bool = False
    """Whether files are written and read."""


MEASURES = {
    "against_peers": Measure(
        measure=against_peers.measure, table=against_peers.table, has_peer=True
    ),
    "growth": Measure(measure=growth.measure, table=growth.table, draw=draw_growth, has_peer=True),
    "ops": Measure(measure=ops.measure, table=ops.table),
    "ablation": Measure(measure=ablation.measure, table=ablation.table),
    "index": Measure(measure=index.measure, table=index.table),
    "ssd": Measure(measure=ssd.measure, table=ssd.table, on_disk=True),
    "tiers": Measure(measure=tiers.measure, table=tiers.table, draw=draw_tiers, on_disk=True),
}
"""In the order in which they are made: the longest is the last."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures; 1 where something required is not met, 2 where there is no peer."""
    options = parse(arguments)
    chosen = {name: MEASURES[name] for name in options.only or MEASURES}
    if any(one.has_peer for one in chosen.values()):
        try:
            check_peer()
        except WorkerError as error:
            print(error, file=sys.stderr)
            return 2
    requirements: list[Result] = []
    for name, one in chosen.items():
        start = time.perf_counter()
        result = one.measure(folder=options.folder) if one.on_disk else one.measure()
        save(result, options.out / f"{name}.json")
        if one.draw is not None:
            one.draw(result, options.out / f"{name}.png")
        requirements += result.get("requirements", [])
        seconds = time.perf_counter() - start
        print(f"== {name}, {seconds:.0f} s ==\n{one.table(result)}\n", flush=True)
    print(f"== required figures ==\n{summary(requirements)}")
    return 0 if all(one["met"] for one in requirements) else 1


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="All measurements.")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        help="where the rows of ssd and tiers lie, on the disk to be measured; what is written is "
        "removed. Default: the folder of temporary files, which TMPDIR names. ssd takes 2 GB, "
        f"tiers {tiers.GIGABYTES} GB, and {tiers.LARGE_GIGABYTES} GB for its store of 10 GB, "
        "which is left out where they are not free",
    )
    parser.add_argument("only", nargs="*", choices=[*MEASURES, []], help="default: all")
    return parser.parse_args(arguments)


def check_peer() -> None:
    """Raises `WorkerError` where the peer is not installed, before anything is measured."""
    with peer() as worker:
        worker.ask("check")


if __name__ == "__main__":
    sys.exit(main())
