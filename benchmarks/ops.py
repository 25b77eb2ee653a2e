# SPDX-License-Identifier: Apache-2.0
"""Each operation, the C++ kernel against XLA: ``python -m benchmarks.ops``.

The bytes of an operation are what it must read and write where everything is touched once; their
rate is told as a share of the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.bandwidth import copy_bandwidth
from benchmarks.op_works import Work, works
from benchmarks.report import (
    Result,
    describe_machine,
    grid,
    machine,
    requirement,
    run_turns,
    summary,
)
from benchmarks.turns import quartiles
from jaxsparse.ops.native import library

ROUNDS, CALLS = 5, 5
"""Turns of each implementation, and timed calls of a turn."""
MOST_MS = 1000.0
"""Of one turn; it is cut after the call that passes this."""

HOT, DISTINCT = "one, dim 64", "distinct, dim 64"
MOST_HOT = 1.5
"""Time of one group of all entries over that of groups of one."""


def _call(program: Any, state: Any, inputs: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    outcome = jax.block_until_ready(program(state, inputs))
    return outcome[0], (time.perf_counter() - start) * 1e3


def time_work(work: Work, implementations: list[str], rounds: int) -> dict[str, Result]:
    """Quartiles of ms by implementation, which take turns; the first call of each compiles."""
    inputs = jax.tree.map(jnp.asarray, work.inputs)
    programs = {
        name: jax.jit(partial(work.run, name), donate_argnums=0) for name in implementations
    }
    # Copied inside jit: what has borrowed numpy's memory cannot be updated in place.
    state = jax.jit(partial(jax.tree.map, jnp.copy))(work.state)
    times: dict[str, list[float]] = {name: [] for name in implementations}
    for name in implementations:
        state, _ = _call(programs[name], state, inputs)
    for number in range(rounds):
        for name in implementations[:: 1 if number % 2 == 0 else -1]:
            state, spent = _call(programs[name], state, inputs)  # its rows are in no cache
            for _ in range(CALLS):
                state, call_ms = _call(programs[name], state, inputs)
                times[name].append(call_ms)
                spent += call_ms
                if spent > MOST_MS:
                    break
    return {name: quartiles(ms) for name, ms in times.items()}


def measure(rounds: int = ROUNDS, chosen: Callable[[], Iterator[Work]] = works) -> Result:
    """All operations.

    Args:
        rounds: turns of each implementation.
        chosen: what is timed; smaller operations are for tests.
    """
    bandwidth = copy_bandwidth()
    implementations = ["native", "xla"] if library.is_available() else ["xla"]
    told = []
    for work in chosen():
        print(f"ops: {work.op}, {work.case}", file=sys.stderr)
        times = time_work(work, implementations, rounds)
        best = times[implementations[0]]
        rate = work.least_bytes / best["lower"] * 1e3
        told.append(
            {
                "op": work.op,
                "case": work.case,
                "bytes": work.least_bytes,
                **times,
                "bytes_per_s": rate,
                "share": rate / bandwidth,
            }
        )
    return {
        "benchmark": "ops",
        "machine": machine(),
        "copy_bandwidth": bandwidth,
        "native": library.why_not() or "there",
        "rounds": rounds,
        "ops": told,
        "requirements": _requirements(told, implementations[0]),
    }


def _requirements(told: list[Result], best: str) -> list[Result]:
    by_case = {one["case"]: one[best]["lower"] for one in told if one["op"] == "bag_gradients"}
    if not {HOT, DISTINCT} <= by_case.keys():
        return []
    what = "106,496 gradients of one row over those of distinct ones"
    return [requirement(what, by_case[HOT] / by_case[DISTINCT], MOST_HOT, at_least=False)]


def table(result: Result) -> str:
    """The result for people."""
    rows = [["", "native ms", "xla ms", "ratio", "GB/s", "of copies"]]
    for one in result["ops"]:
        native, xla = (one[name]["lower"] if name in one else None for name in ("native", "xla"))
        rows.append(
            [
                f"{one['op']}: {one['case']}",
                "" if native is None else f"{native:.2f}",
                f"{xla:.2f}",
                "" if native is None else f"{xla / native:.1f}",
                f"{one['bytes_per_s'] / 1e9:.1f}",
                f"{one['share']:.0%}",
            ]
        )
    head = (
        f"{describe_machine(result)}; copies {result['copy_bandwidth'] / 1e9:.0f} GB/s; "
        f"native kernels: {result['native']}; lower quartiles"
    )
    return "\n".join([head, grid(rows), summary(result["requirements"])])


def main() -> Result:
    """Measures, prints and keeps the result."""
    return run_turns(__doc__, measure, table, rounds=ROUNDS)


if __name__ == "__main__":
    main()
