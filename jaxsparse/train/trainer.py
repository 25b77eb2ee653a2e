# SPDX-License-Identifier: Apache-2.0
"""`Trainer`: model, tables and optimizers put together, and the loop around the step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from flax import nnx

from jaxsparse.data.batch import Batch
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.ladder import Ladder
from jaxsparse.train.batches import OnBadSample, PackedBatch, admit, pack_batch
from jaxsparse.train.callbacks import Callback, FitEvent
from jaxsparse.train.metrics import BinaryMetrics
from jaxsparse.train.report import FitResult, Reporter, Window
from jaxsparse.train.state import TrainState, device_bytes, replicate
from jaxsparse.train.step import (
    Loss,
    ReduceGrads,
    StepProgram,
    eval_step,
    sum_grads,
    train_step,
)


class Dataset(Protocol):
    """Anything that yields batches each time it is iterated."""

    def __iter__(self) -> Iterator[Batch]:
        """One pass over the data."""
        ...


class Trainer:
    """Trains a dense model over an `EmbeddingCollection`.

    The trainer holds no state: ``init`` makes one, every method takes and returns it. It keeps a
    `Ladder` of batch sizes, so that a run compiles few programs.
    """

    def __init__(
        self,
        model: nnx.Module,
        emb: EmbeddingCollection,
        *,
        optimizer: optax.GradientTransformation,
        loss: Loss = optax.sigmoid_binary_cross_entropy,
        link: Callable[[jax.Array], jax.Array] = jax.nn.sigmoid,
        reduce_grads: ReduceGrads = sum_grads,
        on_bad_sample: OnBadSample = "error",
    ) -> None:
        """Puts the parts together.

        Args:
            model: ``nnx.Module`` called as ``model(acts, dense, train=)``; returns logits ``[b]``
                or a dict of them. Its parameters are the initial ones.
            emb: the tables.
            optimizer: optax transformation of the dense parameters.
            loss: per-sample loss ``(logits [b], labels [b]) -> [b]``.
            link: from logits to what `predict` returns.
            reduce_grads: ``(dense gradients, mesh axes) -> gradients``: the sum over devices.
            on_bad_sample: what happens to samples whose labels, weights or dense features are not
                finite: ``"error"`` before the step, ``"drop"`` the samples, ``"skip"`` the batch.

        Raises:
            ValueError: ``on_bad_sample`` is none of these.
        """
        if on_bad_sample not in get_args(OnBadSample):
            raise ValueError(
                f"Trainer: on_bad_sample must be one of {get_args(OnBadSample)}, "
                f"got {on_bad_sample!r}"
            )
        graphdef = nnx.graphdef(model)
        params, keys, others = nnx.state(model, nnx.Param, nnx.RngKey, ...)
        self.emb = emb
        self.link = link
        self.on_bad_sample = on_bad_sample
        self.program = StepProgram(graphdef, emb, optimizer, loss, reduce_grads)
        self._initial = (params, (keys, others))
        self._ladder, self._eval_ladder = Ladder(), Ladder()

    def init(self, key: jax.Array) -> TrainState:
        """A fresh state: the model's parameters, new tables.

        Args:
            key: typed key; tables are drawn from it, dropout from a key folded from it.
        """
        params, model_state = self._initial
        opt_state = jax.jit(self.program.optimizer.init)(params)
        whole = (jnp.int32(0), params, model_state, opt_state, jax.random.fold_in(key, 1))
        step, params, model_state, opt_state, rng = replicate(whole, self.emb.mesh)
        return TrainState(step, params, model_state, opt_state, self.emb.init(key), rng)

    def pack(self, batch: Batch) -> PackedBatch | None:
        """Checks and ships a batch; None where the policy is to skip it.

        Raises:
            ValueError, TypeError: the batch is invalid; nothing was changed.
        """
        admitted = admit(batch, self.on_bad_sample)
        return None if admitted is None else pack_batch(self.emb, admitted, self._ladder)

    def step(
        self, state: TrainState, batch: Batch | PackedBatch
    ) -> tuple[TrainState, dict[str, Any]]:
        """One update; ``state`` is donated.

        Args:
            state: from `init` or the last step.
            batch: raw or packed.

        Returns:
            The new state, and ``loss``, ``finite``, ``logits [B']`` as `train_step` gives them;
            a batch that the policy skips changes nothing and returns ``{"skipped": True}``.
        """
        packed = self.pack(batch) if isinstance(batch, Batch) else batch
        if packed is None:
            return state, {"skipped": True}
        result: tuple[TrainState, dict[str, Any]] = train_step(self.program, state, packed)
        return result

    def fit(
        self,
        dataset: Dataset,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        state: TrainState | None = None,
        seed: int = 0,
        eval_dataset: Dataset | None = None,
        eval_every: int | None = None,
        log_every: int = 50,
        callbacks: Sequence[Callback] = (),
        metrics_path: str | Path | None = None,
        progress: bool = True,
    ) -> FitResult:
        """Trains until a global step or for some epochs.

        Args:
            dataset: iterated again and again until ``steps`` is reached.
            steps: global step to stop at (a state at step 100 and ``steps=150`` make 50 updates).
            epochs: passes over ``dataset``; give this or ``steps``.
            state: where to start, donated; default ``init(jax.random.key(seed))``.
            seed: of the default state.
            eval_dataset: evaluated every ``eval_every`` steps, after each epoch if that is None,
                and at the end.
            eval_every: steps between evaluations.
            log_every: steps between rows of the history.
            callbacks: called with every row; one that returns True ends the training.
            metrics_path: JSON lines file the rows are appended to.
            progress: show progress on stderr.

        Raises:
            ValueError: neither or both of ``steps`` and ``epochs``, an empty dataset, bad input.
            FloatingPointError: loss or gradients of finite input were not finite, under the
                policy ``"error"``; the state was left as before that step.
        """
        if (steps is None) == (epochs is None):
            raise ValueError(f"fit: give steps or epochs, got steps={steps}, epochs={epochs}")
        if state is None:
            state = self.init(jax.random.key(seed))
        path = None if metrics_path is None else Path(metrics_path)
        total = steps if steps is not None else _known_steps(dataset, epochs)
        with Reporter(total, path, progress) as reporter:
            loop = _FitLoop(self, state, reporter, callbacks, eval_dataset, eval_every, log_every)
            loop.run(dataset, steps, epochs)
        return FitResult(loop.state, reporter.history)

    def evaluate(self, state: TrainState, dataset: Dataset) -> dict[str, Any]:
        """Metrics over a whole dataset; changes nothing.

        Returns:
            ``loss`` (weighted mean), ``num_samples``, and for 0/1 labels ``auc``, ``logloss``,
            ``ne``, ``calibration`` (with several tasks ``task/auc`` and so on).

        Raises:
            ValueError: the dataset is empty, or a batch is invalid.
        """
        metrics: dict[str, BinaryMetrics] = {}
        loss_sum = weight_sum = 0.0
        num_samples = 0
        for batch, logits, losses in self._forward(state, dataset):
            weights = np.ones(len(losses)) if batch.weights is None else batch.weights
            loss_sum += float(np.sum(np.where(weights > 0, losses, 0) * weights))
            weight_sum += float(np.sum(weights))
            num_samples += int(np.sum(weights > 0))
            for task, (scores, labels) in _by_task(logits, batch.labels).items():
                if np.isin(labels, (0, 1)).all():
                    metrics.setdefault(task, BinaryMetrics()).update(scores, labels, weights)
        if num_samples == 0:
            raise ValueError("evaluate: the dataset has no samples")
        result: dict[str, Any] = {"loss": loss_sum / weight_sum, "num_samples": num_samples}
        for task, metric in metrics.items():
            prefix = f"{task}/" if task else ""
            result |= {f"{prefix}{name}": value for name, value in metric.result().items()}
        return result

    def predict(self, state: TrainState, dataset: Dataset) -> Any:
        """Predictions ``link(logits)`` of every sample, in order; changes nothing.

        Returns:
            ``[n]`` float32, or a dict of them for a model with several tasks.
        """
        parts = [
            jax.tree.map(lambda x: np.asarray(self.link(x)), logits)
            for _, logits, _ in self._forward(state, dataset)
        ]
        if not parts:
            return np.empty(0, np.float32)
        return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)

    def _forward(
        self, state: TrainState, dataset: Iterable[Batch]
    ) -> Iterator[tuple[Batch, Any, npt.NDArray[np.float32]]]:
        """Batches with their logits and losses on the host, without padding."""
        for batch in dataset:
            if batch.num_samples == 0:
                continue
            packed = pack_batch(self.emb, batch, self._eval_ladder)
            outcome = eval_step(self.program, state, packed)
            logits, losses = unpad(outcome, batch.num_samples)
            yield batch, logits, losses


def unpad(tree: Any, num_samples: int) -> Any:
    """Arrays on the host, cut to the real samples."""
    return jax.tree.map(lambda x: np.asarray(x)[:num_samples], tree)


def _by_task(logits: Any, labels: Any) -> dict[str, tuple[Any, Any]]:
    if isinstance(logits, dict):
        return {task: (logits[task], labels[task]) for task in logits}
    return {"": (logits, labels)}


def _known_steps(dataset: Dataset, epochs: int | None) -> int | None:
    try:
        return len(dataset) * (epochs or 1)  # type: ignore[arg-type]
    except TypeError:
        return None


@dataclasses.dataclass
class _FitLoop:
    """The loop's changing parts; one object a call of `fit`."""

    trainer: Trainer
    state: TrainState
    reporter: Reporter
    callbacks: Sequence[Callback]
    eval_dataset: Dataset | None
    eval_every: int | None
    log_every: int

    def __post_init__(self) -> None:
        self.window = Window()
        self.done = int(self.state.step)
        self.pending: tuple[Batch, dict[str, Any]] | None = None
        self.last_end = time.perf_counter()
        self.evaluated_at = -1
        self.stopped = False

    def run(self, dataset: Dataset, steps: int | None, epochs: int | None) -> None:
        epoch = 0
        while not self.stopped and not self._reached(steps) and epoch != epochs:
            started_at = self.done
            self._one_epoch(dataset, steps)
            epoch += 1
            if self.done == started_at and not self.stopped and not self._reached(steps):
                raise ValueError("fit: a pass over the dataset made no step; is it empty?")
            if self.eval_every is None:
                self._evaluate()
        if self.window.step_ms:
            self._log()
        self._evaluate()

    def _reached(self, steps: int | None) -> bool:
        return steps is not None and self.done >= steps

    def _one_epoch(self, dataset: Dataset, steps: int | None) -> None:
        for batch in self._timed(dataset):
            start = time.perf_counter()
            packed = self._admit(batch)
            self.window.input_ms += (time.perf_counter() - start) * 1e3
            # The step before runs while this batch is packed; only now is it waited for.
            self._finish_pending()
            if packed is None:
                continue
            batch, device_batch = packed
            self.state, outcome = train_step(self.trainer.program, self.state, device_batch)
            self.pending = (batch, outcome)
            self.done += 1
            if self._due(steps):
                self._finish_pending()
                if self.done and self.done % self.log_every == 0:
                    self._log()
                if self.eval_every is not None and self.done % self.eval_every == 0:
                    self._evaluate()
            if self.stopped or self._reached(steps):
                break
        self._finish_pending()

    def _due(self, steps: int | None) -> bool:
        every = [self.log_every, *([self.eval_every] if self.eval_every else [])]
        return self._reached(steps) or any(self.done % n == 0 for n in every)

    def _timed(self, dataset: Dataset) -> Iterator[Batch]:
        """The dataset's batches, the time waited for them booked as input."""
        batches = iter(dataset)
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.window.input_ms += (time.perf_counter() - start) * 1e3
            if batch is None:
                return
            yield batch

    def _admit(self, batch: Batch) -> tuple[Batch, PackedBatch] | None:
        admitted = admit(batch, self.trainer.on_bad_sample)
        if admitted is None:
            self.window.skipped += 1
            return None
        return admitted, pack_batch(self.trainer.emb, admitted, self.trainer._ladder)

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
            if self.trainer.on_bad_sample == "error":
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
        row = self.window.row(self.done, device_bytes(self.state))
        self.window = Window()
        self._tell("log", row)

    def _evaluate(self) -> None:
        if self.eval_dataset is None or self.evaluated_at == self.done:
            return
        self.evaluated_at = self.done
        metrics = self.trainer.evaluate(self.state, self.eval_dataset)
        self._tell("eval", {"kind": "eval", "step": self.done, **metrics})
        self.last_end = time.perf_counter()

    def _tell(self, kind: Any, row: dict[str, Any]) -> None:
        self.reporter.add(row)
        event = FitEvent(kind, self.done, row, self.state)
        # Every callback is told, also when an earlier one asks to stop.
        answers = [callback(event) for callback in self.callbacks]
        self.stopped = self.stopped or any(bool(answer) for answer in answers)
