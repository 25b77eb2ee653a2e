# SPDX-License-Identifier: Apache-2.0
"""Benchmark workers without anything to time: in a process of their own, and in this one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.workload import Workload, state_bytes

SMALL = Workload(tables=2, rows=50, dim=4, batch=16, num_batches=2)

PROCESS = """
import time
from benchmarks.workers import serve

class Task:
    def __init__(self, workload, options):
        if workload.dim == 13:
            raise ValueError("13 is no dim")
        print("this is no answer")
        self.facts = {"rows": workload.rows, "options": options}
        self.numbers, self.threads = [], 0
    def step(self, number):
        self.numbers.append(number)
        time.sleep(0.001 * self.threads)
    def settle(self):
        pass
    def set_threads(self, count):
        self.threads = count
    def memory(self):
        return {"steps": len(self.numbers), "threads": self.threads}

def check():
    raise RuntimeError("nothing is installed")

serve(Task, check)
"""
"""Python of a worker process."""


class FakeWorker:
    """Answers at once; a step takes ``ms(workload)``, and one in ten twice as long."""

    def __init__(self, ms: Callable[[Workload], float]) -> None:
        self.ms = ms
        self.runs: list[tuple[int, float | None, int | None]] = []

    def prepare(self, workload: Workload, **options: Any) -> dict[str, Any]:
        self.workload = workload
        return {"path": "native", "options": options}

    def run(
        self, steps: int, seconds: float | None = None, threads: int | None = None
    ) -> list[float]:
        self.runs.append((steps, seconds, threads))
        step_ms = self.ms(self.workload) * (1.5 if threads == 2 else 1.0)
        return [step_ms * (2 if number % 10 == 9 else 1) for number in range(steps)]

    def ask(self, do: str) -> dict[str, int]:
        held = state_bytes(self.workload)
        return {
            "resident_bytes": held + held // 10 + 3000,
            "peak_bytes": 2 * held,
            "base_bytes": 1000,
            "temporary_bytes": 2000,
        }


def fakes(ms: Callable[[Workload], float]) -> Callable[..., Any]:
    """In place of `workers.ours` or `workers.peer`."""

    @contextlib.contextmanager
    def start(*_: Any, **__: Any) -> Iterator[FakeWorker]:
        yield FakeWorker(ms)

    return start
