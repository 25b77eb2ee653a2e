# SPDX-License-Identifier: Apache-2.0
"""The loop of `Trainer.fit`: batches in, rows of history out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxsparse.data.batch import Batch
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.processes import is_shared, maximum
from jaxsparse.train.batches import Dataset, OnBadSample, PackedBatch, admit, unpad
from jaxsparse.train.callbacks import Callback, FitEvent
from jaxsparse.train.lockstep import Lockstep
from jaxsparse.train.report import Reporter, Window
from jaxsparse.train.state import TrainState, device_bytes
from jaxsparse.train.step import StepProgram, train_step


@dataclasses.dataclass
class FitLoop:
    """What changes while `Trainer.fit` runs; one object a call.

    The step in flight is waited for only when the next batch is packed, so that host and device
    work side by side; `done` counts dispatched steps and is taken back where one was not finite.
    """

    program: StepProgram
    emb: EmbeddingCollection
    lockstep: Lockstep
    on_bad_sample: OnBadSample
    evaluate: Callable[[TrainState, Dataset], dict[str, Any]]
    state: TrainState
    reporter: Reporter
    callbacks: Sequence[Callback]
    eval_dataset: Dataset | None
    eval_every: int | None
    log_every: int

    def __post_init__(self) -> None:
        """Starts at the state's step."""
        self.window = Window()
        self.done = int(self.state.step)
        self.pending: tuple[Batch, dict[str, Any]] | None = None
        self.last_end = time.perf_counter()
        self.evaluated_at = -1
        self.stopped = False

    def run(self, dataset: Dataset, steps: int | None, epochs: int | None) -> None:
        """Trains to global step ``steps``, or for ``epochs`` passes."""
        epoch = 0
        while not self.stopped and not self._reached(steps) and epoch != epochs:
            if epoch > 0 and self.eval_every is None:
                self._evaluate()
                if self.stopped:
                    break
            started_at = self.done
            self._one_epoch(dataset, steps)
            epoch += 1
            if self.done == started_at and not self.stopped and not self._reached(steps):
                raise ValueError("fit: a pass over the dataset made no step; is it empty?")
        # The last row comes before the last evaluation, as at any other step.
        if self.window.step_ms or maximum(self.emb.mesh, [self.window.skipped])[0]:
            self._log()
        self._evaluate()

    def _reached(self, steps: int | None) -> bool:
        return steps is not None and self.done >= steps

    def _one_epoch(self, dataset: Dataset, steps: int | None) -> None:
        for batch, device_batch in self._timed(self._admitted(dataset)):
            # The step before runs while this batch is packed; only now is it waited for.
            self._finish_pending()
            self.state, outcome = train_step(self.program, self.state, device_batch)
            self.pending = (batch, outcome)
            self.done += 1
            if self._due(steps):
                self._finish_pending()
                if self._reached(steps) or (self.done and self.done % self.log_every == 0):
                    self._log()
                if self.eval_every is not None and self.done % self.eval_every == 0:
                    self._evaluate()
            self.stopped = self.stopped or self.lockstep.stop_agreed
            if self.stopped or self._reached(steps):
                break
        self._finish_pending()

    def _due(self, steps: int | None) -> bool:
        every = [self.log_every, *([self.eval_every] if self.eval_every else [])]
        return self._reached(steps) or any(self.done % n == 0 for n in every)

    def _timed(self, source: Iterator[Batch]) -> Iterator[tuple[Batch, PackedBatch]]:
        """Batches and what was shipped, the time until they are there booked as input."""
        batches = self.lockstep.batches(source)
        while True:
            start = time.perf_counter()
            item = next(batches, None)
            self.window.input_ms += (time.perf_counter() - start) * 1e3
            if item is None:
                return
            yield item

    def _admitted(self, dataset: Dataset) -> Iterator[Batch]:
        for batch in dataset:
            if batch.num_samples == 0 and is_shared(self.emb.mesh):
                yield batch  # the other processes have samples
                continue
            admitted = admit(batch, self.on_bad_sample)
            if admitted is None:
                self.window.skipped += 1
            else:
                self.window.dropped += batch.num_samples - admitted.num_samples
                yield admitted

    def _finish_pending(self) -> None:
        """Waits for the step in flight and books its outcome."""
        if self.pending is None:
            return
        batch, outcome = self.pending
        self.pending = None
        finite, loss = bool(outcome["finite"]), float(outcome["loss"])
        now = time.perf_counter()
        self.window.step_ms.append((now - self.last_end) * 1e3)
        self.last_end = now
        if not finite:
            self.done -= 1
            if self.on_bad_sample == "error":
                raise FloatingPointError(
                    f"step {self.done}: loss or gradients are not finite (loss {loss}) although "
                    "the input is; the step changed nothing. Lower the learning rates, or set "
                    "on_bad_sample='skip' to leave such batches out"
                )
            self.window.skipped += 1
            return
        weights = np.ones(batch.num_samples) if batch.weights is None else batch.weights
        logits = unpad(outcome["logits"], batch.num_samples)
        self.window.add(loss, logits, batch.labels, weights)
        self.window.samples += batch.num_samples
        self.reporter.advance(self.done)

    def _log(self) -> None:
        row = self.window.row(self.done, device_bytes(self.state), self.emb.mesh)
        self.window = Window()
        self._tell("log", row)

    def _evaluate(self) -> None:
        if self.eval_dataset is None or self.evaluated_at == self.done:
            return
        self.evaluated_at = self.done
        metrics = self.evaluate(self.state, self.eval_dataset)
        self._tell("eval", {"kind": "eval", "step": self.done, **metrics})
        self.last_end = time.perf_counter()

    def _tell(self, kind: Any, row: dict[str, Any]) -> None:
        self.reporter.add(row)
        event = FitEvent(kind, self.done, row, self.state)
        # Every callback is told, also when an earlier one asks to stop.
        answers = [callback(event) for callback in self.callbacks]
        stop = any(bool(answer) for answer in answers)
        self.stopped = self.stopped or bool(maximum(self.emb.mesh, [stop])[0])
