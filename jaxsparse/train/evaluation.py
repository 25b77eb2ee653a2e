# SPDX-License-Identifier: Apache-2.0
"""The forward pass over a whole dataset, and what `Trainer.evaluate` adds up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.data.batch import Batch
from jaxsparse.data.prefetch import Prefetcher
from jaxsparse.lockstep import Lockstep, Ready
from jaxsparse.store import RowReader
from jaxsparse.train.batches import Dataset, unpad
from jaxsparse.train.feed import check_prefetch
from jaxsparse.train.metrics import BinaryMetrics
from jaxsparse.train.state import TrainState
from jaxsparse.train.step import StepProgram, eval_step

Admit = Callable[[Batch], Batch | None]
Outcomes = Generator[tuple[Batch, Any, npt.NDArray[np.float32]], None, None]


def forward(
    program: StepProgram,
    lockstep: Lockstep,
    state: TrainState,
    dataset: Dataset,
    admit: Admit | None,
    prefetch: int,
) -> Outcomes:
    """This process's batches with their logits and losses on the host, without padding.

    Close it: batches are made ready on a thread.

    Args:
        program: of the step.
        lockstep: ships the batches.
        state: the state.
        dataset: iterated once.
        admit: what is left of a batch, None for nothing; None leaves all as they are.
        prefetch: batches made ahead; 0 makes each when it is needed.
    """
    check_prefetch(prefetch)

    def ready(batch: Batch) -> Ready | None:
        kept = admit(batch) if admit and batch.num_samples else batch
        return lockstep.ready(kept) if kept and kept.num_samples else None

    # Of the iterator: left early, the dataset is not set back into this pass, but starts the next.
    batches = iter(dataset)
    made = Prefetcher(batches, ready, depth=prefetch) if prefetch else map(ready, batches)
    try:
        for batch, packed in lockstep.batches(item for item in made if item is not None):
            outcome = eval_step(program, state, packed)
            if batch.num_samples:
                logits, losses = unpad(outcome, batch.num_samples)
                yield batch, logits, losses
    finally:
        if isinstance(made, Prefetcher):
            made.close()


def forward_stored(
    program: StepProgram,
    reader: RowReader,
    state: TrainState,
    dataset: Dataset,
    admit: Admit | None,
) -> Outcomes:
    """As `forward`, for tables of a row store: the rows of a batch are copied beside training."""
    batches = _admitted(dataset, admit)
    while True:
        batch, error = None, None
        try:
            batch = next(batches, None)
        except Exception as failed:
            error = failed  # the other processes must hear of it
        loaded = reader.load(state.embeddings, batch, error)
        if loaded is None:
            return
        small = dataclasses.replace(state, embeddings=loaded.state)
        outcome = eval_step(dataclasses.replace(program, emb=loaded.emb), small, loaded.batch)
        if batch is not None:
            logits, losses = unpad(outcome, batch.num_samples)
            yield batch, logits, losses


def _admitted(dataset: Dataset, admit: Admit | None) -> Iterator[Batch]:
    """Batches with samples."""
    for raw in dataset:
        batch = admit(raw) if admit and raw.num_samples else raw
        if batch is not None and batch.num_samples:
            yield batch


class Totals:
    """Sums over samples, of one process or merged."""

    def __init__(self) -> None:
        """Starts without samples."""
        self.metrics: dict[str, BinaryMetrics] = {}
        self.not_binary: set[str] = set()
        self.loss = self.weight = 0.0
        self.num_samples = self.num_weightless = 0

    def add(self, batch: Batch, logits: Any, losses: npt.NDArray[np.float32]) -> None:
        """Adds a batch: logits and losses ``[B]`` on the host, without padding."""
        weights = np.ones(len(losses)) if batch.weights is None else batch.weights
        self.loss += float(np.sum(np.where(weights > 0, losses, 0) * weights))
        self.weight += float(np.sum(weights))
        self.num_samples += int(np.sum(weights > 0))
        self.num_weightless += int(np.sum(weights == 0))
        for task, (scores, labels) in _by_task(logits, batch.labels).items():
            if np.isin(labels[weights > 0], (0, 1)).all():
                self.metrics.setdefault(task, BinaryMetrics()).update(scores, labels, weights)
            else:
                self.not_binary.add(task)  # metrics of the other batches alone would mislead

    def merge(self, other: Totals) -> None:
        """Adds all samples of ``other``."""
        for task, metric in other.metrics.items():
            self.metrics.setdefault(task, BinaryMetrics()).merge(metric)
        self.not_binary |= other.not_binary
        self.loss += other.loss
        self.weight += other.weight
        self.num_samples += other.num_samples
        self.num_weightless += other.num_weightless

    def result(self) -> dict[str, Any]:
        """The metrics; raises where there were no samples."""
        if self.num_samples == 0:
            if self.num_weightless:
                raise ValueError(
                    f"evaluate: all {self.num_weightless} samples have weight 0: there is nothing "
                    "to take a mean of"
                )
            raise ValueError("evaluate: the dataset has no samples")
        result: dict[str, Any] = {"loss": self.loss / self.weight, "num_samples": self.num_samples}
        for task, metric in self.metrics.items():
            if task in self.not_binary:
                continue
            prefix = f"{task}/" if task else ""
            result |= {f"{prefix}{name}": value for name, value in metric.result().items()}
        return result


def _by_task(logits: Any, labels: Any) -> dict[str, tuple[Any, Any]]:
    if isinstance(logits, dict):
        return {task: (logits[task], labels[task]) for task in logits}
    return {"": (logits, labels)}
