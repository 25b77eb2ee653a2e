# SPDX-License-Identifier: Apache-2.0
"""The loop of `Trainer.fit`: batches in, rows of history and saves out."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxsparse.ckpt import CheckpointManager, Restored
from jaxsparse.data.batch import Batch
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.lockstep import Lockstep
from jaxsparse.processes import gather, is_shared, maximum
from jaxsparse.state import EmbeddingState
from jaxsparse.store import RowStore
from jaxsparse.train.batches import Dataset, OnBadSample, admit, unpad
from jaxsparse.train.callbacks import Callback, FitEvent
from jaxsparse.train.feed import START, Ahead, Feed, undisturbed
from jaxsparse.train.profiling import ProfileSteps
from jaxsparse.train.report import Reporter, Window
from jaxsparse.train.run_state import (
    my_position,
    pack_callbacks,
    restore_callbacks,
    restore_dataset,
    restore_window,
)
from jaxsparse.train.state import TrainState, device_bytes
from jaxsparse.train.step import StepProgram, train_step
from jaxsparse.train.stored import Item, StoredBatches, summarise

REMEMBERED = ("epoch", "pass_ended", "evaluated_at", "eval_metrics", "stopped")
"""Fields of the loop that are saved as they are."""


@dataclasses.dataclass
class FitLoop:
    """What changes while `Trainer.fit` runs; one object a call.

    The step in flight is waited for only when the next batch is there, so that host and device
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
    prefetch: int
    checkpoint: CheckpointManager | None = None
    profile: ProfileSteps | None = None
    store: RowStore | None = None
    batches_per_pass: int | None = None

    def __post_init__(self) -> None:
        """Starts at the state's step."""
        self.window = Window()
        self.passes: list[dict[str, Any]] = []
        self.moved = {} if self.store is None else self.store.bytes_moved()
        self.done = int(self.state.step)
        self.pending: tuple[Batch, dict[str, Any]] | None = None
        self.last_end = time.perf_counter()
        self.evaluated_at = self.saved_at = -1
        self.eval_metrics: dict[str, Any] = {}
        self.stopped = self.interrupted = self.save_due = False
        self.dataset: Dataset | None = None
        self.epoch = 0
        self.pass_ended = False
        self.position, self.resumed_at = START, START
        # Held by whoever reads a dataset: evaluations and callbacks may use the one that is
        # trained on.
        self.data_lock = threading.RLock()

    def resume(self, restored: Restored, dataset: Dataset) -> None:
        """Goes on where a save was made; one without a run gives its state alone.

        Raises:
            CheckpointError: dataset or callbacks are not those of the run.
        """
        self.saved_at = self.done
        run = restored.run
        if run is None:
            return
        restore_callbacks(self.callbacks, run["callbacks"], restored.others)
        for name in REMEMBERED:
            setattr(self, name, run[name])
        restore_window(self.window, run["windows"], self.emb.mesh)
        if self.store is not None and "passes" in run:
            self.passes = run["passes"]["facts"]
            before = run["passes"]["bytes"]
            self.moved = {n: count - before.get(n, 0) for n, count in self.moved.items()}
        self.position = my_position(run["positions"], self.emb.mesh)
        restore_dataset(dataset, self.position)
        if not self.pass_ended:
            self.resumed_at = self.position

    def run(self, dataset: Dataset, steps: int | None, epochs: int | None) -> None:
        """Trains to global step ``steps``, or for ``epochs`` passes."""
        self.dataset = dataset
        while not self._ends(steps) and (epochs is None or self.epoch < epochs):
            if self.pass_ended:
                if self.eval_every is None:
                    self._evaluate()
                if self.save_due:
                    self._save()
                if self._ends(steps):
                    break
            started_at, whole = self.done, self.resumed_at is START
            self._one_pass(dataset, steps)
            self.epoch += self.pass_ended
            if whole and self.done == started_at and not self._ends(steps):
                raise ValueError("fit: a pass over the dataset made no step; is it empty?")
        if not self.interrupted:
            # The last row comes before the last evaluation, as at any other step.
            if self.window.step_ms or maximum(self.emb.mesh, [self.window.skipped])[0]:
                self._log()
            self._evaluate()
        self._save()

    def _ends(self, steps: int | None) -> bool:
        if self.lockstep.stop_agreed:
            # What can be taken up is left as it is; otherwise this is a stop like others.
            self.interrupted = self.checkpoint is not None
            self.stopped = self.stopped or not self.interrupted
        return self.stopped or self.interrupted or self._reached(steps)

    def _reached(self, steps: int | None) -> bool:
        return steps is not None and self.done >= steps

    def _one_pass(self, dataset: Dataset, steps: int | None) -> None:
        """Trains to the end of the pass, or of the run."""
        feed = Feed(
            dataset,
            self._admit,
            self.lockstep.ready if self.store is None else lambda batch: batch,
            self.resumed_at,
            prefetch=self.prefetch if self.store is None else 0,  # the store draws ahead
            needed=None if steps is None else steps - self.done,
            lock=self.data_lock,
        )
        self.resumed_at, self.pass_ended = START, False
        with contextlib.closing(feed), contextlib.closing(self._ahead(feed, steps)) as ahead:
            while (item := self._take(ahead)) is not None:
                batch, device_batch = item
                # The step before runs while this batch is taken; only now is it waited for.
                self._finish_pending()
                self._book(feed, batch)
                if self.profile is not None:
                    self.profile.at(self.done)
                self.state, outcome = train_step(self.program, self.state, device_batch)
                self.pending = (batch, outcome)
                self.done += 1
                if self._due(steps):
                    self._at_due_step(ahead, steps)
                if self._ends(steps):
                    break
            self._finish_pending()
            if self.profile is not None:
                self.profile.at(self.done)
            # Only a save has to know, and to fetch one batch more may take its time.
            ended = item is None and not self.lockstep.stop_agreed
            if ended or (self.checkpoint is not None and not self._has_more(ahead)):
                self.pass_ended = True
                self._book(feed, None)

    def _ahead(self, feed: Feed, steps: int | None) -> Ahead[Item] | StoredBatches:
        """Batches and what was shipped, their rows on the devices."""
        if self.store is None:
            return Ahead(self.lockstep.batches(iter(feed)))
        until = partial(self._until_cut, steps)
        return StoredBatches(
            self.store, iter(feed), until, self._enter, self._stops, self.batches_per_pass
        )

    def _until_cut(self, steps: int | None) -> int | None:
        """Steps until the run may be saved or end; None if that is not known."""
        every = [] if self.checkpoint is None else [self.checkpoint.every]
        saves_best = self.checkpoint is not None and self.checkpoint.best is not None
        if self.eval_every is not None and (self.callbacks or saves_best):
            every.append(self.eval_every)
        if self.callbacks:
            every.append(self.log_every)
        left = [] if steps is None else [steps - self.done]
        return min([*left, *(n - self.done % n for n in every)], default=None)

    def _stops(self) -> bool:
        return self.lockstep.stop_requested

    def _enter(
        self, change: Callable[[EmbeddingState], EmbeddingState], facts: dict[str, Any]
    ) -> None:
        """Lets a pass of the row store change the tables."""
        self.state = dataclasses.replace(self.state, embeddings=change(self.state.embeddings))
        self.passes.append(facts)

    def _at_due_step(self, ahead: Ahead[Item] | StoredBatches, steps: int | None) -> None:
        """Rows, evaluations and saves after a step; a save at the end of a pass waits for it."""
        self._finish_pending()
        if self._reached(steps) or (self.done and self.done % self.log_every == 0):
            self._log()
        if self.eval_every is not None and self.done % self.eval_every == 0:
            self._evaluate()
        if self.checkpoint is not None and self.done and self.done % self.checkpoint.every == 0:
            self.save_due = True
        if self.save_due and not self._ends(steps) and self._has_more(ahead):
            self._save()

    def _due(self, steps: int | None) -> bool:
        every = [self.log_every, *([self.eval_every] if self.eval_every else [])]
        every += [self.checkpoint.every] if self.checkpoint else []
        return self._reached(steps) or any(self.done % n == 0 for n in every)

    def _take(self, ahead: Ahead[Item] | StoredBatches) -> Item | None:
        """The next batch and what was shipped."""
        with self._waiting():
            item = ahead.take()
        if isinstance(ahead, StoredBatches):
            self.lockstep.stop_agreed = ahead.is_stopped
        return item

    def _has_more(self, ahead: Ahead[Item] | StoredBatches) -> bool:
        with self._waiting():
            return ahead.has_more()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Books the time inside as input, but not while a step runs: that loses nothing by it."""
        start = time.perf_counter()
        yield
        if self.pending is None or self.pending[1]["loss"].is_ready():
            self.window.input_ms += (time.perf_counter() - start) * 1e3

    def _book(self, feed: Feed, batch: Batch | None) -> None:
        """Counts what was left out before a batch, and where to go on behind it."""
        for drawn in feed.trained(batch):
            self.window.skipped += drawn.skipped
            self.window.dropped += drawn.dropped
            self.position = drawn.position

    def _admit(self, batch: Batch) -> Batch | None:
        if batch.num_samples == 0 and is_shared(self.emb.mesh):
            return batch  # the other processes have samples
        kept = admit(batch, self.on_bad_sample, self.program.wants_probabilities)
        if kept is None:
            return None
        # They are read once more behind the step, when the dataset may have filled them anew.
        weights = None if kept.weights is None else np.array(kept.weights)
        labels = jax.tree.map(np.array, kept.labels)
        return dataclasses.replace(kept, labels=labels, weights=weights)

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
        bad_rows = getattr(self.dataset, "bad_rows", None)
        if bad_rows is not None and bad_rows.total:
            row["skipped_rows"] = dict(bad_rows.counts.most_common())
        self.window = Window()
        if self.store is not None:
            row |= summarise(self.passes, self._bytes_moved())
            self.passes, self.moved = [], self.store.bytes_moved()
        self._tell("log", row)

    def _bytes_moved(self) -> dict[str, int]:
        """By tier and direction since the last row of the history."""
        now = {} if self.store is None else self.store.bytes_moved()
        return {name: count - self.moved.get(name, 0) for name, count in now.items()}

    def _evaluate(self) -> None:
        if self.eval_dataset is None or self.evaluated_at == self.done:
            return
        self.evaluated_at = self.done
        with self.data_lock, undisturbed(self.dataset):
            metrics = self.evaluate(self.state, self.eval_dataset)
        self.eval_metrics = metrics
        if self.checkpoint is not None and self.checkpoint.best is not None:
            self.save_due = True
        self._tell("eval", {"kind": "eval", "step": self.done, **metrics})
        self.last_end = time.perf_counter()

    def _save(self) -> None:
        """Saves the run as it is after the last step that was made."""
        self.save_due = False
        if self.checkpoint is None or self.saved_at == self.done:
            return
        start = time.perf_counter()
        callbacks, others = pack_callbacks(self.callbacks)
        run = {
            **self.reporter.state(),
            **{name: getattr(self, name) for name in REMEMBERED},
            "positions": gather(self.emb.mesh, self.position),
            "windows": gather(self.emb.mesh, self.window.state()),
            "callbacks": callbacks,
        }
        metrics = self.eval_metrics if self.evaluated_at == self.done else None
        if self.store is not None:
            run["passes"] = {"facts": self.passes, "bytes": self._bytes_moved()}
        self.checkpoint.save(
            self.emb, self.state, run=run, metrics=metrics, others=others, store=self.store
        )
        self.saved_at = self.done
        self.last_end = time.perf_counter()
        self.window.save_ms += (self.last_end - start) * 1e3

    def _tell(self, kind: Any, row: dict[str, Any]) -> None:
        self.reporter.add(row)
        event = FitEvent(kind, self.done, row, self.state)
        # Every callback is told, also when an earlier one asks to stop.
        answers: list[bool | None] = []
        if self.callbacks:
            with self.data_lock, undisturbed(self.dataset):
                answers = [callback(event) for callback in self.callbacks]
        stop = any(bool(answer) for answer in answers)
        self.stopped = self.stopped or bool(maximum(self.emb.mesh, [stop])[0])
