# SPDX-License-Identifier: Apache-2.0
"""What a save costs the steps after it: ``python -m benchmarks.saves``.

The model is that of ``examples/criteo.toml``. Steps of one batch are timed one by one, each waited
for; after some of them the state is saved, and steps go on until the save is on the disk.
"""

from __future__ import annotations

import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax

from benchmarks.pipeline import Bench
from benchmarks.report import describe_machine, machine, run
from jaxsparse.ckpt import CheckpointManager
from jaxsparse.train import Trainer, TrainState
from jaxsparse.train.state import device_bytes

PLAIN_STEPS = 8
"""Timed before each save."""


def timed_step(trainer: Trainer, state: TrainState, batch: Any) -> tuple[TrainState, float]:
    """A step, and its milliseconds."""
    start = time.perf_counter()
    state, outcome = trainer.step(state, batch)
    jax.block_until_ready((state, outcome))
    return state, (time.perf_counter() - start) * 1e3


def one_save(
    trainer: Trainer, state: TrainState, batch: Any, manager: CheckpointManager
) -> tuple[TrainState, dict[str, float]]:
    """Steps, a save, and steps until it is on the disk; at least one."""
    plain = []
    for _ in range(PLAIN_STEPS):
        state, step_ms = timed_step(trainer, state, batch)
        plain.append(step_ms)
    step_ms = statistics.median(plain)
    start = time.perf_counter()
    manager.save(trainer.emb, state)
    stopped_ms = (time.perf_counter() - start) * 1e3
    beside = []
    while not beside or manager.is_saving:
        state, one_ms = timed_step(trainer, state, batch)
        beside.append(one_ms)
    manager.wait()
    total_ms = (time.perf_counter() - start) * 1e3
    return state, {
        "step_ms": step_ms,
        "stopped_ms": stopped_ms,
        "next_step_ms": beside[0],
        "step_beside_ms": statistics.median(beside),
        "steps_beside": len(beside),
        "lost_ms": total_ms - len(beside) * step_ms,
        "save_ms": total_ms if manager.background else stopped_ms,
    }


def measure(num_rows: int, rounds: int, assignments: list[str] | None = None) -> dict[str, Any]:
    """Both kinds of saves, alternating; medians over rounds.

    Args:
        num_rows: of the data, of which one batch is used.
        rounds: how many.
        assignments: changes to ``examples/criteo.toml``.
    """
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(pathlib.Path(folder), num_rows, assignments or [])
        trainer, state = bench.trainer, bench.state
        batch = trainer.pack(next(iter(bench.memory)))
        managers = {
            name: CheckpointManager(
                pathlib.Path(folder, name), keep=1, background=name != "stopped"
            )
            for name in ("stopped", "background")
        }
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in managers}
        for _ in range(rounds):
            for name, manager in managers.items():
                state, told = one_save(trainer, state, batch, manager)
                rows[name].append(told)
        return {
            "benchmark": "saves",
            "machine": machine(),
            "state_bytes": device_bytes(state),
            "median": {
                name: {key: statistics.median(one[key] for one in told) for key in told[0]}
                for name, told in rows.items()
            },
            "rounds": rows,
        }


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"{describe_machine(result)}; {result['state_bytes'] / 1e6:,.0f} MB of state",
        f"{'ms':10s}    step  stopped  next step  step beside  lost in all    save",
    ]
    for name, told in result["median"].items():
        lines.append(
            f"{name:10s} {told['step_ms']:7.0f}  {told['stopped_ms']:7.0f}  "
            f"{told['next_step_ms']:9.0f}  {told['step_beside_ms']:11.0f}  "
            f"{told['lost_ms']:11.0f}  {told['save_ms']:6.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run(__doc__, measure, table, num_rows=8192)
