# SPDX-License-Identifier: Apache-2.0
"""This project and FBGEMM/PyTorch in turns: ``python -m benchmarks.against_peers``.

Two processes hold the same tables and ids; one works while the other waits. The peer's thread
count is the one it is fastest with. Ratios are of lower quartiles over the turns.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.bandwidth import copy_bandwidth
from benchmarks.report import (
    Result,
    describe_machine,
    grid,
    machine,
    requirement,
    run_turns,
    summary,
)
from benchmarks.turns import best_threads, steady_turns
from benchmarks.workers import Worker, ours, peer
from benchmarks.workload import Workload, bytes_moved, distinct_rows

PAIRS = 12
"""Turns of each of the two."""

WORKLOADS = {
    "sparse, exact Adagrad": Workload(),
    "sparse, row-wise Adagrad": Workload(rule="rowwise_adagrad"),
    "DLRM step, exact Adagrad": Workload(part="dlrm"),
    "sparse, exact Adagrad, one by one": Workload(waits=True),
}
REQUIRED = dict(zip(WORKLOADS, (3.0, 1.5, 1.3), strict=False))
"""Least ratio of the peer's time to ours; none where each of our steps is waited for."""
TARGETS = dict(zip(WORKLOADS, (5.0, 2.0, 1.3), strict=False))
REQUIRED_SHARE, TARGET_SHARE = 0.35, 0.6
"""Of the copy bandwidth, for the first workload."""

STEPS, SECONDS = 20, 0.4
"""Of one turn: whichever ends it first."""


def compare(workload: Workload, us: Worker, them: Worker, rounds: int) -> Result:
    """Both prepared and timed in turns."""
    facts = {"ours": us.prepare(workload), "peer": them.prepare(workload)}
    threads, by_threads = best_threads(them, STEPS, SECONDS)
    turns = {
        "ours": partial(us.run, STEPS, SECONDS),
        "peer": partial(them.run, STEPS, SECONDS, threads),
    }
    told = steady_turns(turns, rounds)
    distinct = distinct_rows(workload.draw())
    return {
        "workload": workload.as_dict(),
        "distinct_rows": distinct,
        "bytes": bytes_moved(workload, distinct),
        "facts": facts,
        "peer_threads": threads,
        "peer_ms_by_threads": {str(count): step_ms for count, step_ms in by_threads.items()},
        **told,
        "ratio": told["peer"]["lower"] / told["ours"]["lower"],
    }


def measure(rounds: int = PAIRS, workloads: dict[str, Workload] | None = None) -> Result:
    """All comparisons.

    Args:
        rounds: turns of each of the two.
        workloads: by name, in the order of `WORKLOADS`; smaller ones are for tests.
    """
    workloads = workloads or WORKLOADS
    bandwidth = copy_bandwidth()
    told: dict[str, Any] = {}
    with ours() as us, peer() as them:
        for name, workload in workloads.items():
            told[name] = compare(workload, us, them, rounds)
    bandwidth = max(bandwidth, copy_bandwidth())
    for one in told.values():
        if one["workload"]["part"] == "sparse":
            floor_ms = one["bytes"] / bandwidth * 1e3
            one |= {"floor_ms": floor_ms, "share": floor_ms / one["ours"]["lower"]}
    required = [
        requirement(f"{name}: times as fast as the peer", told[name]["ratio"], REQUIRED[name])
        for name in told
        if name in REQUIRED
    ]
    first = next(iter(told))
    share = requirement(
        f"{first}: share of the copy-bandwidth floor", told[first]["share"], REQUIRED_SHARE
    )
    return {
        "benchmark": "against_peers",
        "machine": machine(),
        "copy_bandwidth": bandwidth,
        "rounds": rounds,
        "targets": {**TARGETS, "share": TARGET_SHARE},
        "workloads": told,
        "requirements": [*required, share],
    }


def table(result: Result) -> str:
    """The result for people."""
    rows = [["", "ours ms", "spread", "peer ms", "spread", "threads", "ratio", "of floor"]]
    for name, one in result["workloads"].items():
        pair = [
            cell
            for who in ("ours", "peer")
            for cell in (f"{one[who]['lower']:.1f}", f"{one[who]['spread']:.0%}")
        ]
        share = f"{one['share']:.0%}" if "share" in one else ""
        rows.append([name, *pair, str(one["peer_threads"]), f"{one['ratio']:.2f}", share])
    paths = {one["facts"]["ours"]["path"] for one in result["workloads"].values()}
    return "\n".join(
        [
            f"{describe_machine(result)}; copies {result['copy_bandwidth'] / 1e9:.0f} GB/s; "
            f"ours on {', '.join(sorted(paths))}; lower quartiles of {result['rounds']} turns",
            grid(rows),
            summary(result["requirements"]),
        ]
    )


def main() -> Result:
    """Measures, prints and keeps the result."""
    return run_turns(__doc__, measure, table, rounds=PAIRS)


if __name__ == "__main__":
    main()
