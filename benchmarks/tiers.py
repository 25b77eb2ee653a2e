# SPDX-License-Identifier: Apache-2.0
"""Training through a row store, its rows in other places: ``python -m benchmarks tiers``.

A DLRM whose 26 features share one table of Dynamic keys, drawn by a bounded Zipf law. Set-ups take
turns in one run, each in a process of its own: all rows on the device; a slab of a twentieth and
the host's memory; a slab, some memory and a disk that has at least four fifths of the rows, read
past the page cache and through it. What is told of a set-up is all samples of its turns over all
their seconds, boundaries and new rows included; and its peak of memory beside what can be told of
it before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.report import Result, describe_machine, grid, machine, requirement, summary
from benchmarks.tier_hits import HitWorkload, hit_lines, measure_hits
from benchmarks.tier_large import LargeStore, large_lines, large_requirements, measure_large
from benchmarks.tier_model import STEP_MS, sized
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
LEAST_ON_DISK = 0.8
"""Of the rows of a table that has a disk."""
ADMITTED_AT = (1, 2)
"""Occurrences at which a key gets a row: variants of a run."""
MEMORY = (0.9, 1.1)
"""Bytes of memory that are stated over those at the peak."""
CURVE = (1 / 2, 1 / 5, 1 / 10)
"""Slabs of the chart, over the rows of the table, beside that of the set-ups."""
CURVE_SETUPS = ("ram", "ssd, cached")
GIGABYTES, LARGE_GIGABYTES = 12, 14
"""Of the disk: for the set-ups, and for the large store behind them."""


def take_round(workers: Mapping[str, Worker], passes: int, number: int) -> dict[str, list[float]]:
    """A turn of every worker, in an order that alternates: milliseconds of each pass."""
    names = list(workers)[:: 1 if number % 2 == 0 else -1]
    return {name: workers[name].run(passes) for name in names}


def compare(
    workload: TierWorkload, names: Sequence[str], rounds: int, folder: pathlib.Path | None
) -> Result:
    """Set-ups of one workload, in turns."""
    pass_steps = workload.batches_per_pass
    # A pass of each turn is not timed.
    workload = dataclasses.replace(workload, steps=rounds * (workload.passes + 1) * pass_steps)
    options = {} if folder is None else {"folder": str(folder)}
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(tier()) for name in names}

        def prepare(name: str) -> Result:
            return workers[name].prepare(dataclasses.replace(workload, **SETUPS[name]), **options)

        # Two at a time; nothing of it is timed.
        with ThreadPoolExecutor(2) as threads:
            facts = dict(zip(names, threads.map(prepare, names), strict=True))
        taken = [take_round(workers, workload.passes, number) for number in range(rounds)]
        ends = {name: worker.ask("memory") for name, worker in workers.items()}
    steps = rounds * workload.passes * pass_steps
    told = {}
    for name in names:
        turns = [sum(one[name]) / workload.passes / pass_steps for one in taken]
        mean_ms = sum(turns) / rounds
        told[name] = {
            "samples_per_s": workload.batch / mean_ms * 1e3,
            "step_ms": {"mean": mean_ms, **quartiles(turns)},
            "turn_ms": turns,
            "facts": facts[name],
            "end": ends[name],
            "stated_over_peak": sum(ends[name]["stated"].values()) / ends[name]["peak_bytes"],
        }
    return {"workload": workload.as_dict(), "steps": steps, "setups": told}


def measure_curve(
    workload: TierWorkload,
    slabs: Sequence[float],
    rounds: int,
    folder: pathlib.Path | None,
    known: Result,
) -> Result:
    """Samples a second by rows over device rows: slabs of several sizes, one after another.

    Args:
        workload: of all points.
        slabs: over the rows of the table.
        rounds: turns of each point.
        folder: for the disks.
        known: `compare` of the workload: the points without tiers and with its own slab.
    """
    points = []
    compared = [
        compare(dataclasses.replace(workload, slab_share=share), CURVE_SETUPS, rounds, folder)
        for share in slabs
    ]
    for one in (*compared, known):
        for name in ("device", *CURVE_SETUPS):
            if name in one["setups"]:
                told = one["setups"][name]
                ratio = told["end"]["size"] / told["end"]["device_rows"]
                rate = told["samples_per_s"]
                points.append({"setup": name, "rows_per_device_row": ratio, "samples_per_s": rate})
    points.sort(key=lambda point: point["rows_per_device_row"])
    return {"rows": workload.rows, "points": points}


def measure(
    folder: pathlib.Path | None = None,
    *,
    rounds: int = ROUNDS,
    workload: TierWorkload | None = None,
    hits_of: HitWorkload | None = None,
    slabs: Sequence[float] = CURVE,
    large: LargeStore | None = None,
) -> Result:
    """Hits; set-ups with and without admission; the points of the chart; a large store.

    Args:
        folder: for the disks; None is that of temporary files.
        rounds: turns of each set-up.
        workload: a smaller one is for tests; None has a model sized for this machine.
        hits_of: the same.
        slabs: the same.
        large: the same.
    """
    workload = workload or sized(TierWorkload())
    hits = measure_hits(hits_of)
    told = {
        f"admitted at {count}": compare(
            dataclasses.replace(workload, min_count=count), list(SETUPS), rounds, folder
        )
        for count in ADMITTED_AT
    }
    for one in told.values():
        base = one["setups"]["device"]["samples_per_s"]
        for setup in one["setups"].values():
            setup["share"] = setup["samples_per_s"] / base
    first = next(iter(told.values()))
    curve = measure_curve(workload, slabs, max(2, rounds // 4), folder, first)
    store = measure_large(large or LargeStore(), folder)
    return {
        "benchmark": "tiers",
        "machine": machine(),
        "rounds": rounds,
        "hits": hits,
        "compared": told,
        "curve": curve,
        "large": store,
        "requirements": [
            *hits["requirements"],
            *requirements(told),
            *large_requirements(store),
        ],
    }


def requirements(compared: Mapping[str, Result]) -> list[Result]:
    """What the figures must reach."""
    found = []
    for how, one in compared.items():
        setups = one["setups"]
        step_ms = setups["device"]["step_ms"]["mean"]
        found += [
            requirement(f"device, {how}: steps timed", one["steps"], LEAST_STEPS),
            *within(f"device, {how}: ms a step", step_ms, STEP_MS),
        ]
        for name, least in LEAST.items():
            what = f"{name}, {how}: share of all on the device"
            found.append(requirement(what, setups[name]["share"], least))
        for name in ("ssd, direct", "ssd, cached"):
            end = setups[name]["end"]
            what = f"{name}, {how}: share of rows on the disk"
            found.append(requirement(what, end["ssd_rows"] / end["size"], LEAST_ON_DISK))
        for name, told in setups.items():
            what = f"{name}, {how}: memory stated over the peak"
            found += within(what, told["stated_over_peak"], MEMORY)
    return found


def within(what: str, got: float, limits: tuple[float, float]) -> list[Result]:
    """A figure that has to lie between two."""
    least, most = limits
    return [requirement(what, got, least), requirement(what, got, most, at_least=False)]


def table(result: Result) -> str:
    """The result for people."""
    lines = [describe_machine(result), *hit_lines(result["hits"])]
    for how, one in result["compared"].items():
        work = one["workload"]
        rows = [
            ["", "samples/s", "share", "ms/step", "quartiles", "hits", "rows", "peak GB", "stated"]
        ]
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
                    f"{told['stated_over_peak']:.0%}",
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
            f"{point['setup']:12s} {point['rows_per_device_row']:5.1f} rows a device row: "
            f"{point['samples_per_s']:,.0f} samples/s"
        )
    lines += large_lines(result["large"])
    return "\n".join([*lines, summary(result["requirements"])])
