# SPDX-License-Identifier: Apache-2.0
"""Processes that time steps on request, so that several can take turns in one run.

A worker reads requests, one JSON object a line, and answers each with one line. While another one
runs it waits for input and takes no core.

- ``{"do": "prepare", "workload": {...}, "options": {...}}`` -> facts about what was made, which
  takes the place of what was there before.
- ``{"do": "run", "steps": n, "seconds": s, "threads": t}`` -> ``{"ms": [...]}``: at most n timed
  steps, one warm-up before them, ended after s seconds but not before three steps.
- ``{"do": "memory"}`` -> resident bytes and the like, as the worker knows them.
- ``{"do": "release"}`` -> ``{}``: frees what was prepared.
- ``{"do": "check"}`` -> ``{}``, or an error where the worker lacks what it times.

What goes wrong is answered as ``{"error": text}``. The end of the input ends the worker.
Needs the standard library alone, and numpy through `workload`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from benchmarks.workload import Workload

ROOT = pathlib.Path(__file__).parents[1]
LEAST_STEPS = 3
"""Timed in a run, however long they take."""


class Task(Protocol):
    """Something prepared, whose steps can be timed."""

    facts: dict[str, Any]

    def step(self, number: int) -> None:
        """Makes a step, and waits for it or for the one before."""

    def settle(self) -> None:
        """Waits for all that was begun."""

    def set_threads(self, count: int) -> None:
        """Limits the threads of the steps to come."""

    def memory(self) -> dict[str, int]:
        """Bytes by kind."""


class HasFields(Protocol):
    """What a worker prepares, such as a `Workload`."""

    def as_dict(self) -> dict[str, Any]:
        """Its fields, for JSON."""


Prepare = Callable[[Any, dict[str, Any]], Task]
"""Of a workload and options."""


class WorkerError(Exception):
    """A worker could not do what it was asked, or is gone; the message says why."""


def serve(
    prepare: Prepare, check: Callable[[], Any] = dict, workload: Callable[..., Any] = Workload
) -> None:
    """Answers requests until the input ends; stdout carries answers and nothing else.

    Args:
        prepare: makes a task of a workload and options.
        check: raises where what the worker times is not installed.
        workload: makes one of its fields.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    task: Task | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] in ("prepare", "release"):
            task = None
            gc.collect()
        try:
            if request["do"] == "prepare":
                task = prepare(workload(**request["workload"]), request.get("options", {}))
            if request["do"] == "check":
                check()
            answer = _answer(task, request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


def _answer(task: Task | None, request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] in ("check", "release"):
        return {}
    if task is None:
        raise RuntimeError(f"{request['do']!r} needs something prepared")
    if request["do"] == "prepare":
        return task.facts
    if request["do"] == "memory":
        return task.memory()
    if request["do"] == "run":
        return {"ms": _timed(task, request)}
    raise ValueError(f"requests are prepare, run, memory, release and check, got {request['do']!r}")


def _timed(task: Task, request: dict[str, Any]) -> list[float]:
    if request.get("threads"):
        task.set_threads(request["threads"])
    task.step(0)
    times: list[float] = []
    end = time.perf_counter() + (request.get("seconds") or float("inf"))
    while len(times) < request["steps"]:
        start = time.perf_counter()
        task.step(len(times) + 1)
        now = time.perf_counter()
        times.append((now - start) * 1e3)
        if now > end and len(times) >= LEAST_STEPS:
            break
    task.settle()
    return times


class Worker:
    """The other end: a running worker process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None):
        """Starts it.

        Args:
            command: of the process, which calls `serve`.
            environment: variables besides those of this process.

        Raises:
            WorkerError: there is no such program.
        """
        self.name = command[-1].rpartition(".")[2]
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            raise WorkerError(f"{self.name}: {command[0]} does not run: {error}") from error

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Sends a request and waits for its answer.

        Raises:
            WorkerError: the worker says what went wrong, or has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise WorkerError(f"{self.name}: the worker ended with {code}; its output says why")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name}: {answer['error']}")
        return answer

    def prepare(self, workload: HasFields, **options: Any) -> dict[str, Any]:
        """Makes a workload ready; facts about it."""
        return self.ask("prepare", workload=workload.as_dict(), options=options)

    def run(
        self, steps: int, seconds: float | None = None, threads: int | None = None
    ) -> list[float]:
        """Milliseconds of each step."""
        times: list[float] = self.ask("run", steps=steps, seconds=seconds, threads=threads)["ms"]
        return times

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def peer_python() -> str:
    """The interpreter of the peers: ``JAXSPARSE_PEER_PYTHON``, or this one."""
    return os.environ.get("JAXSPARSE_PEER_PYTHON") or sys.executable


@contextlib.contextmanager
def ours(environment: Mapping[str, str] | None = None, devices: int = 1) -> Iterator[Worker]:
    """A worker of this project, on a number of CPU devices."""
    command = [sys.executable, "-m", "benchmarks.ours"]
    with _closing(command, {**_on_cpus(devices), **(environment or {})}) as worker:
        yield worker


@contextlib.contextmanager
def tier() -> Iterator[Worker]:
    """A worker that trains through a row store."""
    command = [sys.executable, "-m", "benchmarks.tier_task"]
    with _closing(command, _on_cpus(1)) as worker:
        yield worker


def _on_cpus(devices: int) -> dict[str, str]:
    """Environment of a worker, whatever number of devices this process has."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if "host_platform_device_count" not in flag]
    if devices > 1:
        flags.append(f"--xla_force_host_platform_device_count={devices}")
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}


@contextlib.contextmanager
def peer() -> Iterator[Worker]:
    """A worker of FBGEMM and PyTorch."""
    with _closing([peer_python(), "-m", "benchmarks.peer_torchrec"], {}) as worker:
        yield worker


@contextlib.contextmanager
def _closing(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Worker]:
    worker = Worker(command, environment)
    try:
        yield worker
    finally:
        worker.close()


def resident_bytes() -> int:
    """Memory of this process that is in RAM; Linux only."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def peak_bytes() -> int:
    """The most it ever was."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
