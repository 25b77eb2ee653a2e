# SPDX-License-Identifier: Apache-2.0
"""The step with one thing at a time left out: ``python -m benchmarks.ablation``.

All variants are processes of their own that hold the same tables and take turns. Dedup cannot be
left out, because an update moves each row once; what it spares is shown by a batch whose ids are
all distinct, which is the work there would be without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks.report import Result, describe_machine, grid, machine, run_turns
from benchmarks.turns import quartiles, take_turns
from benchmarks.workers import Worker, ours
from benchmarks.workload import Workload

ROUNDS = 6
STEPS, SECONDS = 12, 0.4
"""Of one turn: whichever ends it first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """The whole, less one thing."""

    title: str
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of `benchmarks.ours.prepare`."""
    workload: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields that differ."""


VARIANTS = {
    "all": Variant(title="all of it"),
    "dedup": Variant(title="no dedup: ids all distinct", workload={"ids": "distinct"}),
    "fusion": Variant(title="no fusion: a user's own rule", options={"users_rule": True}),
    "native": Variant(title="no native operations", environment={"JAXSPARSE_NATIVE": "0"}),
    "in_place": Variant(title="no update in place", options={"donate": False}),
    "allocator": Variant(
        title="no settings of the allocator", environment={"JAXSPARSE_ALLOCATOR": "0"}
    ),
}
WORKLOADS = {"sparse": Workload(), "dlrm": Workload(part="dlrm")}


def compare(workload: Workload, rounds: int) -> dict[str, Result]:
    """Quartiles and memory of every variant, by name."""
    with contextlib.ExitStack() as stack:
        workers = {
            name: stack.enter_context(ours(variant.environment))
            for name, variant in VARIANTS.items()
        }

        def prepare(name: str) -> None:
            variant = VARIANTS[name]
            changed = dataclasses.replace(workload, **variant.workload)
            workers[name].prepare(changed, **variant.options)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(prepare, VARIANTS))
        turns = {name: partial(worker.run, STEPS, SECONDS) for name, worker in workers.items()}
        times = take_turns(turns, rounds)
        return {name: {**quartiles(times[name]), **_memory(workers[name])} for name in VARIANTS}


def _memory(worker: Worker) -> dict[str, int]:
    told = worker.ask("memory")
    return {key: told[key] for key in ("resident_bytes", "peak_bytes")}


def measure(rounds: int = ROUNDS, workloads: dict[str, Workload] | None = None) -> Result:
    """Both parts; smaller workloads are for tests."""
    workloads = workloads or WORKLOADS
    told = {}
    for part, workload in workloads.items():
        print(f"ablation: {part}", file=sys.stderr)
        told[part] = compare(workload, rounds)
    return {
        "benchmark": "ablation",
        "machine": machine(),
        "rounds": rounds,
        "titles": {name: variant.title for name, variant in VARIANTS.items()},
        "workloads": {part: workload.as_dict() for part, workload in workloads.items()},
        "variants": told,
    }


def table(result: Result) -> str:
    """The result for people."""
    head = [""]
    for part in result["variants"]:
        head += [f"{part} ms", "times", "peak GB"]
    rows = [head]
    for name, title in result["titles"].items():
        row = [title]
        for told in result["variants"].values():
            one = told[name]
            times = one["lower"] / told["all"]["lower"]
            row += [f"{one['lower']:.1f}", f"{times:.2f}", f"{one['peak_bytes'] / 1e9:.2f}"]
        rows.append(row)
    return "\n".join(
        [f"{describe_machine(result)}; lower quartiles of {result['rounds']} turns", grid(rows)]
    )


def main() -> Result:
    """Measures, prints and keeps the result."""
    return run_turns(__doc__, measure, table, rounds=ROUNDS)


if __name__ == "__main__":
    main()
