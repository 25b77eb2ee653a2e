# SPDX-License-Identifier: Apache-2.0
"""Training through a row store, its rows in other places: ``python -m benchmarks.tiers``.

A DLRM whose 26 features share one table of Dynamic keys, drawn by a bounded Zipf law. Set-ups take
turns in one run, each in a process of its own: all rows on the device; a slab of a twentieth and
the host's memory; a slab, some memory and a disk that has at least four fifths of the rows, read
past the page cache and through it. What is told of a set-up is all samples of its turns over all
their seconds, boundaries and new rows included.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

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
from benchmarks.tier_chart import draw_tiers
from benchmarks.tier_hits import HitWorkload, hit_lines, measure_hits
from benchmarks.tier_task import TierWorkload
from benchmarks.turns import quartiles
from benchmarks.workers import Worker, tier

ROUNDS = 20
LEAST_STEPS = 200
"""Timed for figures to quote."""

SETUPS: dict[str, dict[str, Any]] = {
    "device": {"tier": "device"},
    "ram": {"tier": "ram"},
    "ssd, direct": {"tier": "ssd", "direct": True},
    "ssd, cached": {"tier": "ssd"},
}
LEAST = {"ram": 0.85, "ssd, direct": 0.6, "ssd, cached": 0.7}
"""Share of the samples a second of all rows on the device."""
CURVE = (1 / 2, 1 / 5, 1 / 10, 1 / 20)
"""Slabs of the chart, over the rows of the table."""
CURVE_SETUPS: dict[str, dict[str, Any]] = {name: {"tier": name} for name in ("ram", "ssd")}
LEAST_ON_DISK = 0.8
STEP_MS = (90.0, 110.0)
"""What a step takes with all rows on the device, for figures to quote."""


def take_round(workers: Mapping[str, Worker], passes: int, number: int) -> dict[str, list[float]]:
    """A turn of every worker, in an order that alternates: milliseconds of each pass."""
    names = list(workers)[:: 1 if number % 2 == 0 else -1]
    return {name: workers[name].run(passes) for name in names}


def compare(workload: TierWorkload, setups: Mapping[str, dict[str, Any]], rounds: int) -> Result:
    """All set-ups of one workload, in turns."""
    with contextlib.ExitStack() as stack:
        workers, facts = {}, {}
        for name, fields in setups.items():
            workers[name] = stack.enter_context(tier())
            facts[name] = workers[name].prepare(dataclasses.replace(workload, **fields))
        taken = [take_round(workers, workload.passes, number) for number in range(rounds)]
        ends = {name: worker.ask("memory") for name, worker in workers.items()}
    steps = rounds * workload.passes * workload.batches_per_pass
    told = {}
    for name in setups:
        turns = [sum(one[name]) / workload.passes / workload.batches_per_pass for one in taken]
        mean_ms = sum(turns) / rounds
        told[name] = {
            "samples_per_s": workload.batch / mean_ms * 1e3,
            "step_ms": {"mean": mean_ms, **quartiles(turns)},
            "turn_ms": turns,
            "facts": facts[name],
            "end": ends[name],
        }
    base = told[next(iter(setups))]["samples_per_s"]
    for one in told.values():
        one["share"] = one["samples_per_s"] / base
    return {"workload": workload.as_dict(), "steps": steps, "setups": told}


def measure_curve(workload: TierWorkload, rounds: int) -> Result:
    """Samples a second by rows over device rows: slabs of several sizes, one after another."""
    points = []
    for slab_share in (None, *CURVE):
        kinds = {"device": {"tier": "device"}} if slab_share is None else CURVE_SETUPS
        fields = {} if slab_share is None else {"slab_share": slab_share}
        one = compare(dataclasses.replace(workload, **fields), kinds, rounds)
        for name, told in one["setups"].items():
            ratio = told["end"]["size"] / told["end"]["device_rows"]
            rate = told["samples_per_s"]
            points.append({"tier": name, "rows_per_device_row": ratio, "samples_per_s": rate})
    return {"rows": workload.rows, "points": points}


def measure(
    rounds: int = ROUNDS,
    workload: TierWorkload | None = None,
    hits_of: HitWorkload | None = None,
) -> Result:
    """Hits; set-ups with and without admission; the points of the chart.

    Args:
        rounds: turns of each set-up.
        workload: a smaller one is for tests.
        hits_of: the same.
    """
    workload = workload or TierWorkload()
    hits = measure_hits(hits_of)
    told = {
        f"admitted at {count}": compare(
            dataclasses.replace(workload, min_count=count), SETUPS, rounds
        )
        for count in (1, 2)
    }
    return {
        "benchmark": "tiers",
        "machine": machine(),
        "rounds": rounds,
        "hits": hits,
        "compared": told,
        "curve": measure_curve(workload, max(2, rounds // 4)),
        "requirements": [*hits["requirements"], *requirements(told)],
    }


def requirements(compared: Mapping[str, Result]) -> list[Result]:
    """What the figures must reach."""
    found = []
    for how, one in compared.items():
        setups = one["setups"]
        for name, least in LEAST.items():
            what = f"{name}, {how}: share of all on the device"
            found.append(requirement(what, setups[name]["share"], least))
        for name in ("ssd, direct", "ssd, cached"):
            end = setups[name]["end"]
            what = f"{name}, {how}: share of rows on the disk"
            found.append(requirement(what, end["ssd_rows"] / end["size"], LEAST_ON_DISK))
    return found


def table(result: Result) -> str:
    """The result for people."""
    lines = [describe_machine(result), *hit_lines(result["hits"])]
    for how, one in result["compared"].items():
        work = one["workload"]
        rows = [["", "samples/s", "share", "ms/step", "quartiles", "hits", "rows", "peak GB"]]
        for name, told in one["setups"].items():
            step, end = told["step_ms"], told["end"]
            rows.append(
                [
                    name,
                    f"{told['samples_per_s']:,.0f}",
                    f"{told['share']:.0%}",
                    f"{step['mean']:.1f}",
                    f"{step['lower']:.1f}-{step['upper']:.1f}",
                    f"{end['pass']['hit_rate']:.3f}",
                    f"{end['size']:,}",
                    f"{end['peak_bytes'] / 1e9:.2f}",
                ]
            )
        reader = one["setups"]["ssd, cached"]["facts"]["reader"]
        lines.append(
            f"{how}; {one['steps']} steps of {work['batch']} x {work['features']}, D "
            f"{work['dim']}, K {work['batches_per_pass']}; index "
            f"{one['setups']['device']['facts']['index']}, reader {reader}"
        )
        lines.append(grid(rows))
    for point in result["curve"]["points"]:
        lines.append(
            f"{point['tier']:8s} {point['rows_per_device_row']:5.1f} rows a device row: "
            f"{point['samples_per_s']:,.0f} samples/s"
        )
    return "\n".join([*lines, summary(result["requirements"])])


def main() -> Result:
    """Measures, prints and keeps the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns; as many to quote")
    parser.add_argument("--rows", type=int, default=TierWorkload.rows, help="of the table")
    parser.add_argument("--keys", type=int, default=TierWorkload.num_keys, help="of the log")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "tiers.json")
    options = parser.parse_args()
    workload = TierWorkload(rows=options.rows, num_keys=options.keys)
    result = measure(options.rounds, workload)
    save(result, options.out)
    draw_tiers(result, options.out.with_suffix(".png"))
    print(table(result))
    return result


if __name__ == "__main__":
    main()
