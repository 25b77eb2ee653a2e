# SPDX-License-Identifier: Apache-2.0
"""What a run tells: rows of metrics, a progress line, a file, a picture."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from jaxsparse.processes import gather
from jaxsparse.train.event_file import EventFile
from jaxsparse.train.metrics import BinaryMetrics

History = list[dict[str, Any]]


_WINDOW_FIELDS = ("input_ms", "samples", "skipped", "dropped", "save_ms", "_loss", "_weight")


class Window:
    """Collects what happened between two rows of the history."""

    def __init__(self) -> None:
        """Starts an empty window now."""
        self.step_ms: list[float] = []
        self.input_ms = 0.0
        self.samples = 0
        self.skipped = 0
        self.dropped = 0
        self.save_ms = 0.0
        self._loss = 0.0
        self._weight = 0.0
        self._metrics: BinaryMetrics | None = BinaryMetrics()

    def state(self) -> dict[str, Any]:
        """Everything it holds; `restore` brings it back bit for bit."""
        plain = {name: getattr(self, name) for name in _WINDOW_FIELDS}
        metrics = None if self._metrics is None else self._metrics.state()
        return {**plain, "step_ms": np.array(self.step_ms), "metrics": metrics}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over a `state`."""
        for name in _WINDOW_FIELDS:
            setattr(self, name, state[name])
        self.step_ms = state["step_ms"].tolist()
        self._metrics = None
        if state["metrics"] is not None:
            self._metrics = BinaryMetrics()
            self._metrics.restore(state["metrics"])

    def merge(self, other: Window) -> None:
        """Adds another process's part; the times stay."""
        self.samples += other.samples
        self.skipped += other.skipped
        self.dropped += other.dropped
        self._loss += other._loss
        self._weight += other._weight
        if self._metrics is None or other._metrics is None:
            self._metrics = None
        else:
            self._metrics.merge(other._metrics)

    def clear(self) -> None:
        """Forgets all but the times."""
        times = self.step_ms
        self.__init__()  # type: ignore[misc]
        self.step_ms = times

    def add(self, loss: float, logits: Any, labels: Any, weights: Any) -> None:
        """Adds one step's outcome; all on the host, without padding."""
        weight = float(np.sum(weights))
        self._loss += loss * weight
        self._weight += weight
        if self._metrics is None or isinstance(logits, dict):
            self._metrics = None
            return
        if not np.isin(labels[weights > 0], (0, 1)).all():
            self._metrics = None  # a regression: no AUC, no logloss
            return
        self._metrics.update(logits, labels, weights)

    def row(self, step: int, device_bytes: int, mesh: Mesh) -> dict[str, Any]:
        """The row: loss and metrics over all processes' samples, times in ms of this process.

        A collective: every process gets the same loss and metrics.
        """
        counts = (self.samples, self.skipped, self.dropped)
        told = gather(mesh, (self._loss, self._weight, *counts, self._metrics))
        loss, weight, samples, skipped, dropped, metrics = zip(*told, strict=True)
        times = np.array(self.step_ms or [math.nan])
        row = {
            "kind": "train",
            "step": step,
            "loss": sum(loss) / sum(weight) if sum(weight) else math.nan,
            "samples_per_s": sum(samples) / float(times.sum()) * 1e3,
            "samples_per_s_p50": sum(samples) / len(times) / float(np.median(times)) * 1e3,
            "step_ms_p50": float(np.percentile(times, 50)),
            "step_ms_p95": float(np.percentile(times, 95)),
            "step_ms_max": float(times.max()),
            "save_ms": self.save_ms,
            "input_ms": self.input_ms / len(times),
            "input_wait": self.input_ms / float(times.sum()),
            "device_bytes": device_bytes,
            "skipped_batches": sum(skipped),
            "dropped_samples": sum(dropped),
        }
        merged = BinaryMetrics()
        if None not in metrics:
            for part in metrics:
                merged.merge(part)
            row |= merged.result()
        return row


class Reporter:
    """Writes rows to the history, to ``metrics.jsonl`` and to the progress line on stderr."""

    def __init__(
        self,
        total_steps: int | None,
        metrics_path: Path | None,
        progress: bool,
        resumed: Mapping[str, Any] | None = None,
        events_folder: Path | None = None,
    ) -> None:
        """Opens the file for appending.

        Args:
            total_steps: steps of the whole run, if known.
            metrics_path: where rows go, one JSON object a line; None for nowhere.
            progress: whether to show progress.
            resumed: the `state` of the run that is taken up, ``{}`` for one that never came to
                a save: what it wrote into the file after that is cut off. None: a new run.
            events_folder: where TensorBoard events go; None for nowhere.
        """
        self.history: History = list(resumed.get("history", [])) if resumed else []
        self._file = None
        if metrics_path is not None:
            metrics_path.parent.mkdir(parents=True, exist_ok=True)
            if resumed is not None:
                _cut_rows(metrics_path, resumed.get("metrics_bytes"), self.history)
            self._file = metrics_path.open("a", encoding="utf-8")
        self._events = None
        if events_folder is not None:
            next_step = max((row["step"] for row in self.history), default=-1) + 1
            self._events = EventFile(events_folder, None if resumed is None else next_step)
        self._total = total_steps
        console = Console(stderr=True)
        self._progress = progress
        self._plain = progress and not console.is_terminal
        self._bar = Progress(
            # Where the terminal is narrow the bar gives way, not the numbers.
            BarColumn(bar_width=20),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[told]}"),
            console=console,
            disable=not progress or self._plain,
        )
        self._task = self._bar.add_task("train", total=total_steps, told="")

    def __enter__(self) -> Reporter:
        """Starts the progress line."""
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the progress line and closes the file."""
        self._bar.stop()
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()

    def state(self) -> dict[str, Any]:
        """The rows so far; those in the file are on the disk when this returns."""
        size = None
        if self._file is not None:
            os.fsync(self._file.fileno())
            size = os.fstat(self._file.fileno()).st_size
        return {"history": self.history, "metrics_bytes": size}

    def note(self, text: str) -> None:
        """Tells people something that is no row."""
        if self._progress:
            print(text, file=sys.stderr, flush=True)

    def advance(self, step: int) -> None:
        """Moves the progress line."""
        self._bar.update(self._task, completed=step)

    def add(self, row: dict[str, Any]) -> None:
        """Adds one row everywhere."""
        self.history.append(row)
        if self._file is not None:
            self._file.write(json.dumps(json_safe(row)) + "\n")
            self._file.flush()
        if self._events is not None:
            self._events.add(row)
        told = describe_row(row)
        self._bar.update(self._task, told=told)
        if self._plain:
            of = "" if self._total is None else f"/{self._total:,}"
            step = f"{row['step']:,}{of}"
            print(f"{row['kind']:5s} step {step:>9s}  {told}", file=sys.stderr, flush=True)


def _cut_rows(path: Path, size: int | None, history: History) -> None:
    """Leaves in a file what it held at a save; writes it anew where that is not there."""
    if size is not None and path.exists() and path.stat().st_size >= size:
        os.truncate(path, size)
        return
    path.write_text("".join(json.dumps(json_safe(row)) + "\n" for row in history), "utf-8")


def describe_row(row: dict[str, Any]) -> str:
    """Loss, AUC, samples/s and the share of time that input was waited for, for people."""
    parts = []
    # Speed of the median step: the first rows would tell how long compiling took.
    shown = (("loss", "loss", ".4f"), ("auc", "auc", ".4f"))
    for name, label, form in (*shown, ("samples_per_s_p50", "samples/s", ",.0f")):
        if name in row and not math.isnan(row[name]):
            parts.append(f"{label} {row[name]:{form}}")
    if "input_wait" in row and not math.isnan(row["input_wait"]):
        parts.append(f"input wait {row['input_wait']:.0%}")
    if "passes" in row:
        parts.append(_describe_passes(row))
    return "  ".join(parts)


def _describe_passes(row: dict[str, Any]) -> str:
    """What the rows of a row store cost, per pass.

    >>> print(_describe_passes({
    ...     "passes": 2, "hit_rate": 0.934, "new_keys": 3000, "host_to_device_bytes": 5e6,
    ...     "device_to_host_bytes": 4e6, "ssd_read_bytes": 0, "ssd_written_bytes": 2e6,
    ...     "device_wait_ms": 1.0, "ram_wait_ms": 0.2, "ssd_wait_ms": 30.0, "garbage": 0.25}))
    a pass: hits 93%  new 1,500  in/out 2.5/2.0 MB  ssd 0.0/1.0 MB  wait 0.6+15.0 ms  garbage 25%
    """
    passes = row["passes"]

    def pair(first: str, second: str, unit: float) -> str:
        return "/".join(f"{row[name] / unit / passes:.1f}" for name in (first, second))

    told = [
        f"a pass: hits {row['hit_rate']:.0%}  new {row['new_keys'] / passes:,.0f}",
        f"in/out {pair('host_to_device_bytes', 'device_to_host_bytes', 1e6)} MB",
    ]
    near = (row["device_wait_ms"] + row["ram_wait_ms"]) / passes
    if row["ssd_read_bytes"] or row["ssd_written_bytes"] or row["garbage"]:
        told += [
            f"ssd {pair('ssd_read_bytes', 'ssd_written_bytes', 1e6)} MB",
            f"wait {near:.1f}+{row['ssd_wait_ms'] / passes:.1f} ms  garbage {row['garbage']:.0%}",
        ]
    else:
        told.append(f"wait {near:.1f} ms")
    return "  ".join(told)


def json_safe(row: dict[str, Any]) -> dict[str, Any]:
    """The row with what JSON has no number for (nan, infinities) as null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
