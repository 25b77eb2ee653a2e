# SPDX-License-Identifier: Apache-2.0
"""GPU kernels: checked against their references, then timed against what the GPU can do.

Run on a machine with a GPU; it takes less than eight minutes::

    python -m benchmarks.gpu

Each time is compared with that of the bytes it must move at the copy bandwidth measured here, with
XLA's program for the same, and with what FBGEMM publishes for the same sizes. Without a GPU it ends
with code 2.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpu_checks, report
from jaxsparse.ops.dot_interaction import dot_interaction
from jaxsparse.ops.embedding_bag import embedding_bag
from jaxsparse.ops.row_update import row_update
from jaxsparse.ops.segment_sum import bag_gradients
from jaxsparse.ops.unique import unique
from jaxsparse.optimizers import Adagrad, Adam, RowwiseAdagrad

BUDGET_S = 7 * 60
"""Seconds after which nothing more is timed."""

WARM_UP = 2
"""Measurements that do not count: the first compiles."""

FBGEMM_MS = {
    "forward": 0.24,
    "backward, row-wise Adagrad": 0.43,
    "backward, Adagrad": 0.56,
    "backward, Adam": 0.70,
}
"""ms of FBGEMM's table-batched embedding on an H200, from its published figures for an H100 (1.05 M
lookups of 350 k distinct rows, 128 columns, float32) scaled by bandwidth."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of what is timed; the defaults are those of FBGEMM's published figures."""

    num_rows: int = 10_000_000
    num_ids: int = 1_050_000
    num_distinct: int = 350_000
    dim: int = 128
    ids_per_bag: int = 20
    samples: int = 65_536
    vectors: int = 27
    vector_dim: int = 64
    copied_bytes: int = 1 << 30
    """Of the array whose copy tells the bandwidth."""
    rounds: int = 10
    """Measurements, of which the median counts."""
    repeats: int = 10
    """Runs of a kernel in one measurement."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One operation to time: the same function of state and inputs, by implementation."""

    run: Callable[..., Any]
    """Of ``implementation``, the state and the inputs; returns the new state where there is one."""
    state: tuple[Any, ...]
    inputs: tuple[Any, ...]
    least_bytes: int
    """Read and written where everything is touched once."""


def works(sizes: Sizes) -> dict[str, Work]:
    """What is timed, by name."""
    rng = np.random.default_rng(0)
    keys = jax.random.split(jax.random.key(0), 3)
    table = jax.random.normal(keys[0], (sizes.num_rows, sizes.dim), jnp.float32)
    distinct = np.sort(rng.choice(sizes.num_rows, sizes.num_distinct, replace=False))
    slots = rng.integers(0, sizes.num_distinct, sizes.num_ids).astype(np.int32)
    num_bags = -(-sizes.num_ids // sizes.ids_per_bag)
    ends = np.minimum(np.arange(num_bags + 1) * sizes.ids_per_bag, sizes.num_ids)
    order = np.argsort(slots, kind="stable")
    counts = np.bincount(slots, minlength=sizes.num_distinct)
    rows = jnp.asarray(distinct, jnp.int32)
    groups = jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32)
    bags = jnp.asarray(order // sizes.ids_per_bag, jnp.int32)
    bag_grads = jax.random.normal(keys[1], (num_bags, sizes.dim), jnp.float32)
    row_grads = jax.random.normal(keys[2], (sizes.num_distinct, sizes.dim), jnp.float32)

    row_bytes, id_bytes = sizes.dim * 4, 4
    pooled_bytes = num_bags * row_bytes
    distinct_bytes = sizes.num_distinct * row_bytes
    found = {
        "forward": Work(
            _forward,
            (),
            (table, rows, jnp.asarray(slots), jnp.asarray(ends, jnp.int32)),
            # A row that several bags hold is read for each: the cache holds few of them.
            sizes.num_ids * (row_bytes + 2 * id_bytes) + pooled_bytes,
        ),
        "sum of gradients": Work(
            _sum,
            (),
            (bag_grads, groups, bags),
            sizes.num_ids * (row_bytes + id_bytes) + distinct_bytes,
        ),
    }
    backward = sizes.num_ids * (row_bytes + id_bytes) + 2 * distinct_bytes
    for name, rule, wide in (
        ("row-wise Adagrad", RowwiseAdagrad(0.1), 1),
        ("Adagrad", Adagrad(0.1), 2),
        ("Adam", Adam(0.1), 3),
    ):
        state = (table, rule.init_slots(sizes.num_rows, sizes.dim))
        update_bytes = distinct_bytes * (1 + 2 * wide)
        found[f"update, {name}"] = Work(
            partial(_update, rule), state, (rows, row_grads), update_bytes
        )
        found[f"backward, {name}"] = Work(
            partial(_backward, rule),
            state,
            (rows, bag_grads, groups, bags),
            backward + update_bytes - distinct_bytes,
        )
    shape = (sizes.samples, sizes.vector_dim)
    vectors = tuple(
        jax.random.normal(key, shape) for key in jax.random.split(keys[0], sizes.vectors)
    )
    dots = sizes.vectors * sizes.samples * sizes.vector_dim * 4
    pairs = sizes.samples * sizes.vectors * (sizes.vectors - 1) // 2 * 4
    found["dots and gradients"] = Work(_dots, (), (vectors,), 3 * dots + 2 * pairs)
    found["unique"] = Work(
        partial(_unique, sizes.num_rows), (), (rows[jnp.asarray(slots)],), 7 * 4 * sizes.num_ids
    )
    return found


def _forward(implementation: str, table: Any, rows: Any, slots: Any, offsets: Any) -> Any:
    return embedding_bag(table, rows, slots, offsets, implementation=implementation)


def _sum(implementation: str, grads: Any, groups: Any, bags: Any) -> Any:
    return bag_gradients((grads,), groups, bags, implementation=implementation)


def _update(rule: Any, implementation: str, slab: Any, slots: Any, rows: Any, grads: Any) -> Any:
    rates = jnp.full(rows.shape, 0.1, jnp.float32)
    return row_update(rule, slab, slots, rows, grads, rates, 0, implementation=implementation)


def _backward(rule: Any, implementation: str, slab: Any, slots: Any, rows: Any, *grads: Any) -> Any:
    summed = _sum(implementation, *grads)
    return _update(rule, implementation, slab, slots, rows, summed)


def _dots(implementation: str, vectors: Any) -> Any:
    dots, pull_back = jax.vjp(partial(dot_interaction, implementation=implementation), vectors)
    return dots, pull_back(dots)


def _unique(num_rows: int, implementation: Any, rows: Any) -> Any:
    return unique(rows, num_rows, implementation=implementation)


# ---- timing -------------------------------------------------------------------------------------


def time_ms(work: Work, implementation: str, rounds: int, repeats: int) -> float:
    """Median ms of one run; a state is updated in place, from run to run.

    Runs are started without waiting for the one before, so that starting them is hidden.
    """
    step = jax.jit(partial(work.run, implementation), donate_argnums=tuple(range(len(work.state))))
    state = jax.tree.map(jnp.copy, work.state)
    times = []
    for _ in range(rounds + WARM_UP):
        begun = time.perf_counter()
        for _ in range(repeats):
            result = step(*state, *work.inputs)
            state = result if work.state else ()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - begun) * 1e3 / repeats)
    return statistics.median(times[WARM_UP:])


def copy_bandwidth(num_bytes: int, rounds: int) -> float:
    """Bytes read and written a second by a copy on the device."""
    source = jnp.zeros(num_bytes // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    times = []
    for _ in range(rounds + WARM_UP):
        begun = time.perf_counter()
        jax.block_until_ready([copy(source) for _ in range(4)])
        times.append((time.perf_counter() - begun) / 4)
    return 2 * num_bytes / statistics.median(times[WARM_UP:])


def measure(sizes: Sizes, kernels: str = "triton", budget_s: float = BUDGET_S) -> report.Result:
    """Times everything and tells what was reached.

    Args:
        sizes: of what is timed.
        kernels: implementation to time beside XLA's.
        budget_s: seconds after which what is left is not timed but named.
    """
    begun = time.monotonic()
    bandwidth = copy_bandwidth(sizes.copied_bytes, sizes.rounds)
    told: dict[str, dict[str, float | None]] = {}
    skipped = []
    for name, work in works(sizes).items():
        if time.monotonic() - begun > budget_s:
            skipped.append(name)
            continue
        ms = time_ms(work, kernels, sizes.rounds, sizes.repeats)
        xla_ms = time_ms(work, "xla", sizes.rounds, sizes.repeats)
        least_ms = work.least_bytes / bandwidth * 1e3
        told[name] = {
            "ms": ms,
            "xla_ms": xla_ms,
            "least_ms": least_ms,
            "share_of_copy": least_ms / ms,
            "fbgemm_h200_ms": FBGEMM_MS.get(name),
        }
    return {
        "benchmark": "gpu",
        "machine": report.machine(),
        "implementation": kernels,
        "sizes": dataclasses.asdict(sizes),
        "copy_bytes_per_s": bandwidth,
        "results": told,
        "not_timed": skipped,
        "seconds": time.monotonic() - begun,
    }


# ---- telling ------------------------------------------------------------------------------------


def print_table(result: report.Result) -> None:
    """The figures for people."""
    from rich.console import Console
    from rich.table import Table

    speed = result["copy_bytes_per_s"] / 1e12
    table = Table(title=f"{report.describe_machine(result)}; copies at {speed:.2f} TB/s")
    table.add_column("operation", no_wrap=True)
    for column in ("ms", "of copy speed", "XLA ms", "FBGEMM ms (H200)"):
        table.add_column(column, justify="right")
    for name, told in result["results"].items():
        published = told["fbgemm_h200_ms"]
        table.add_row(
            name,
            f"{told['ms']:.3f}",
            f"{told['share_of_copy']:.0%}",
            f"{told['xla_ms']:.3f}",
            "" if published is None else f"{published:.2f}",
        )
    console = Console()
    console.print(table)
    if result["not_timed"]:
        console.print(f"not timed for lack of time: {', '.join(result['not_timed'])}")
    for name, problem in result["checks"].items():
        if problem:
            console.print(f"[red]{name}: {problem}")
    console.print(f"{len(result['checks'])} checks of kernels against their references")


def main(out: str = "gpu.json") -> int:
    """Checks, times and tells.

    Args:
        out: where the JSON goes.

    Returns:
        Exit code: 1 where a kernel differs from its reference, 2 without a GPU.
    """
    if jax.default_backend() != "gpu":
        print(
            f"benchmarks.gpu: needs a GPU, jax has {jax.devices()[0].platform} only; "
            "install jaxsparse[cuda] on a machine that has one",
            file=sys.stderr,
        )
        return 2
    checks = gpu_checks.check_all("triton")
    result = measure(Sizes())
    result["checks"] = checks
    with open(out, "w") as file:
        json.dump(result, file, indent=1)
    print_table(result)
    return 1 if any(checks.values()) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
