# SPDX-License-Identifier: Apache-2.0
"""`Trainer`: model, tables and optimizers put together, and the loop around the step."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxsparse.checks import check_alive
from jaxsparse.ckpt import CheckpointManager, Restored, SaveError
from jaxsparse.data.batch import Batch
from jaxsparse.data.prefetch import DEPTH
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.ladder import Ladder
from jaxsparse.lockstep import Lockstep
from jaxsparse.packed_batch import PackedBatch
from jaxsparse.processes import gather, is_shared, maximum, replicate
from jaxsparse.store import RowReader, RowStore
from jaxsparse.train.batches import Dataset, OnBadSample, admit
from jaxsparse.train.callbacks import Callback, KeepBest
from jaxsparse.train.evaluation import Admit, Outcomes, Totals, forward, forward_stored
from jaxsparse.train.feed import check_prefetch
from jaxsparse.train.fit import FitLoop
from jaxsparse.train.profiling import ProfileSteps
from jaxsparse.train.report import Reporter
from jaxsparse.train.result import FitResult
from jaxsparse.train.run_state import Resume, step_to_resume
from jaxsparse.train.signals import on_sigterm
from jaxsparse.train.state import TrainState
from jaxsparse.train.step import (
    Loss,
    ReduceGrads,
    StepProgram,
    sum_grads,
    train_step,
)
from jaxsparse.train.stored import one_batch


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
                finite, or whose weight is negative: ``"error"`` before the step, ``"drop"`` the
                samples, ``"skip"`` the batch. `evaluate` does the same; `predict` does not look.

        Raises:
            ValueError: ``on_bad_sample`` is none of these.
            TypeError: ``optimizer`` is no optax transformation.
        """
        if on_bad_sample not in get_args(OnBadSample):
            raise ValueError(
                f"Trainer: on_bad_sample must be one of {get_args(OnBadSample)}, "
                f"got {on_bad_sample!r}"
            )
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise TypeError(
                "Trainer: optimizer must be an optax transformation such as optax.adam(1e-3), got "
                f"{optimizer!r}"
            )
        graphdef = nnx.graphdef(model)
        params, keys, others = nnx.state(model, nnx.Param, nnx.RngKey, ...)
        self.emb = emb
        self.link = link
        self.on_bad_sample = on_bad_sample
        self.program = StepProgram(graphdef, emb, optimizer, loss, reduce_grads)
        self._initial = (params, (keys, others))
        self.store: RowStore | None = None
        """Of the state that `init` made last, where tables have Dynamic keys or tiers."""
        self._reader: RowReader | None = None
        self._lockstep, self._eval_lockstep = Lockstep(emb, Ladder()), Lockstep(emb, Ladder())

    def init(self, key: jax.Array) -> TrainState:
        """A fresh state: the model's parameters, new tables.

        Where tables have Dynamic keys or tiers, `store` is a new `RowStore` from here on; it goes
        with this state and those that come of it, and the one before it is closed.

        Args:
            key: typed key; tables are drawn from it, dropout from a key folded from it.
        """
        params, (keys, others) = self._initial
        self._check_same_start(params)
        rng = jax.random.fold_in(key, 1)
        keys = jax.tree.map(lambda k: jax.random.fold_in(k, jax.random.bits(rng)), keys)
        opt_state = jax.jit(self.program.optimizer.init)(params)
        whole = (jnp.int32(0), params, (keys, others), opt_state, rng)
        step, params, model_state, opt_state, rng = replicate(whole, self.emb.mesh)
        tables = self.emb.init(key)
        if self.emb.stored_tables:
            if self.store is not None:
                self.store.close()
            self.store = RowStore(self.emb, tables, discard_rows=True)
            self._reader = RowReader(self.store)
        return TrainState(step, params, model_state, opt_state, tables, rng)

    def _its_store(self) -> RowStore | None:
        """The row store, where one is needed.

        Raises:
            ValueError: there is none: no state was made here.
        """
        if self.emb.stored_tables and self.store is None:
            raise ValueError(
                "the tables have Dynamic keys or tiers, and this trainer has no RowStore: start "
                "from its own trainer.init(key), whose rows it knows"
            )
        return self.store

    def _check_same_start(self, params: Any) -> None:
        leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]
        digest = zlib.crc32(b"".join(leaves)) >> 1
        most, least = maximum(self.emb.mesh, [digest, -digest])
        if most != -least:
            raise ValueError(
                "init: the model's first parameters differ between processes; build it from the "
                "same seed in each of them"
            )

    def pack(self, batch: Batch) -> PackedBatch | None:
        """Checks and ships a batch; None where the policy is to skip it.

        In several processes a collective: each passes its samples, which may be none.

        Raises:
            ValueError, TypeError: the batch is invalid; nothing was changed.
            RuntimeError: another process's batch is.
        """
        shared, error = is_shared(self.emb.mesh), None
        if batch.num_samples or not shared:
            try:
                admitted = admit(batch, self.on_bad_sample, self.program.wants_probabilities)
            except ValueError as refused:
                if not shared:
                    raise
                admitted, error = None, refused  # the other processes must hear of it
            if admitted is None and not shared:
                return None
            batch = admitted or batch.slice(0, 0)
        settled = self._lockstep.pack(batch, error)
        return None if settled is None else settled[1]

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
        check_alive(state)
        store, packed = self._its_store(), None
        if store is not None and isinstance(batch, Batch):
            state, packed = one_batch(store, state, self._one_admitted(batch))
        else:
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
        checkpoint: CheckpointManager | None = None,
        resume: Resume = "auto",
        metrics_path: str | Path | None = None,
        events_folder: str | Path | None = None,
        profile: ProfileSteps | None = None,
        progress: bool = True,
        prefetch: int = DEPTH,
        batches_per_pass: int | None = None,
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
            checkpoint: where the run is saved every ``checkpoint.every`` steps, at the end, and on
                SIGTERM, which ends it.
            resume: with ``checkpoint``: ``"auto"`` goes on from its latest save if there is one
                (``state`` gives no more than the structure then), ``"must"`` fails without one,
                ``"never"`` starts from ``state``. A run that was stopped or killed and is taken
                up with the same arguments ends bitwise as if it had not been; a dataset without
                ``state()`` and ``restore()`` has to yield the same batches again for that.
            metrics_path: JSON lines file the rows are appended to, by process 0; what a killed
                run wrote after the save it is taken up from is cut off first.
            events_folder: the rows go there as TensorBoard events too, by process 0; a run that is
                taken up writes one more file.
            profile: steps to trace; each process its own.
            progress: show progress on stderr, that of process 0.
            prefetch: batches drawn and packed ahead on a thread; results do not depend on it. With
                0 that is done when a batch is needed, by the calling thread: for datasets that
                cannot be drawn from another one. Ended inside a pass, ``fit`` leaves a dataset
                with ``state()`` and ``restore()`` behind the last batch that was trained. Where
                tables need a store, it draws ahead for `fit` on a thread, as many as its passes
                have, and `evaluate` and `predict` draw batch by batch, whatever this says.
            batches_per_pass: as in `RowStore.passes`, where tables need a store; results do not
                depend on it.

        In several processes a collective: each passes its share of the data and the same other
        arguments. A process whose share is shorter goes on with empty batches until an epoch has
        ended for all; an error or a callback that stops one of them stops all. Tables that need a
        store cannot be saved there yet: ``checkpoint`` is refused.

        Raises:
            ValueError: neither or both of ``steps`` and ``epochs``, a count below 1, an empty
                dataset, bad input.
            CheckpointError: there is no save to go on from, or it is not of this run.
            SaveError: a save failed; older ones are as they were.
            FloatingPointError: loss or gradients of finite input were not finite, under the
                policy ``"error"``; the state was left as before that step.

        Whatever is raised while training has the last good state as its ``train_state``.
        """
        if isinstance(dataset, Mapping):
            raise TypeError(
                "fit: expected a dataset, got a dict of columns; make one of it by "
                "js.data.from_arrays(columns, batch_size=...)"
            )
        if (steps is None) == (epochs is None):
            raise ValueError(f"fit: give steps or epochs, got steps={steps}, epochs={epochs}")
        counts = {"epochs": epochs, "eval_every": eval_every, "log_every": log_every}
        counts["batches_per_pass"] = batches_per_pass
        for name, count in counts.items():
            if count is not None and (not isinstance(count, int) or count < 1):
                raise ValueError(f"fit: {name} must be an int of at least 1, got {count}")
        check_prefetch(prefetch)
        if steps is not None and (not isinstance(steps, int) or steps < 0):
            raise ValueError(f"fit: steps must be a global step, an int >= 0, got {steps}")
        if checkpoint is not None and self.emb.stored_tables and is_shared(self.emb.mesh):
            raise ValueError(
                "fit: a run whose tables have Dynamic keys or tiers cannot be saved where several "
                "processes share the mesh; train in one process, or without checkpoint="
            )
        check_alive(state)
        given_step = None if state is None else int(state.step)
        save_step = step_to_resume(checkpoint, resume, given_step, self.emb.mesh)
        if state is None:
            state = self.init(jax.random.key(seed))
        store = self._its_store()
        if store is not None and any(isinstance(callback, KeepBest) for callback in callbacks):
            raise ValueError(
                "fit: KeepBest cannot keep a state whose tables have Dynamic keys or tiers: the "
                "RowStore has the rows of the last state alone; use CheckpointManager(best=)"
            )
        restored = None
        if checkpoint is not None and save_step is not None:
            restored = checkpoint.restore(self.emb, state, save_step, store)
            state = restored.state
        old_rows: dict[str, Any] | None = None
        if checkpoint is not None and resume != "never":
            old_rows = (restored.run if restored else None) or {}
        tells = not is_shared(self.emb.mesh) or jax.process_index() == 0
        path = None if metrics_path is None or not tells else Path(metrics_path)
        events = None if events_folder is None or not tells else Path(events_folder)
        total = steps if steps is not None else _known_steps(dataset, epochs)
        self._lockstep.stop_requested = self._lockstep.stop_agreed = False
        with (
            Reporter(total, path, progress and tells, old_rows, events) as reporter,
            on_sigterm(self.request_stop if checkpoint is not None else None),
        ):
            loop = FitLoop(
                program=self.program,
                emb=self.emb,
                lockstep=self._lockstep,
                on_bad_sample=self.on_bad_sample,
                evaluate=partial(self.evaluate, prefetch=prefetch),
                state=state,
                reporter=reporter,
                callbacks=callbacks,
                eval_dataset=eval_dataset,
                eval_every=eval_every,
                log_every=log_every,
                prefetch=prefetch,
                checkpoint=checkpoint,
                profile=profile,
                store=store,
                batches_per_pass=batches_per_pass,
            )
            if restored is not None:
                _tell_of(reporter, restored)
                loop.resume(restored, dataset)
            try:
                loop.run(dataset, steps, epochs)
            except BaseException as error:
                _let_save_end(checkpoint)
                # The state given to fit was donated: this is the only way to the latest one.
                error.train_state = loop.state  # type: ignore[attr-defined]
                error.add_note("the state before the step that failed is error.train_state")
                raise
            finally:
                if profile is not None:
                    profile.close()
            if checkpoint is not None:
                checkpoint.wait()
        return FitResult(loop.state, reporter.history, loop.interrupted)

    def request_stop(self) -> None:
        """Ends the running `fit` after a step; from any thread, callback or signal handler.

        With ``checkpoint`` the run is saved as it is then, without a last row and evaluation, and
        can be taken up. In several processes one request ends all of them, at the same step.
        """
        self._lockstep.stop_requested = True

    def evaluate(
        self, state: TrainState, dataset: Dataset, *, prefetch: int = DEPTH
    ) -> dict[str, Any]:
        """Metrics over a whole dataset; changes nothing.

        In several processes a collective: each passes its share of the data, shares may differ in
        length, and all get the same numbers, those of all samples.

        Args:
            state: the state.
            dataset: iterated once.
            prefetch: as in `fit`.

        Returns:
            ``loss`` (weighted mean), ``num_samples``, and where all labels are 0 or 1 ``auc``,
            ``logloss``, ``ne``, ``calibration`` (with several tasks ``task/auc`` and so on).

        Raises:
            ValueError: the dataset is empty, or a batch is invalid.
        """
        totals = Totals()
        with self._outcomes(state, dataset, self._admitted, prefetch) as parts:
            for batch, logits, losses in parts:
                totals.add(batch, logits, losses)
        # One process is the case of one part: the numbers of a job do not depend on how many.
        first, *others = gather(self.emb.mesh, totals)
        for other in others:
            first.merge(other)
        result: dict[str, Any] = first.result()
        return result

    def predict(self, state: TrainState, dataset: Dataset, *, prefetch: int = DEPTH) -> Any:
        """Predictions ``link(logits)`` of every sample, in order; changes nothing.

        In several processes a collective: each gets the predictions of its own samples.

        Args:
            state: the state.
            dataset: iterated once.
            prefetch: as in `fit`.

        Returns:
            ``[n]`` float32, or a dict of them for a model with several tasks.
        """
        parts = [
            jax.tree.map(lambda x: np.asarray(self.link(x)), logits)
            for logits in self.logits(state, dataset, prefetch=prefetch)
        ]
        if not parts:
            return np.empty(0, np.float32)
        return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)

    def logits(
        self, state: TrainState, dataset: Dataset, *, prefetch: int = DEPTH
    ) -> Iterator[Any]:
        """Logits of every batch, in order, as it comes: `predict` for data larger than memory.

        Yields:
            ``[b]`` float32 numpy, or a dict of them for a model with several tasks.
        """
        with self._outcomes(state, dataset, None, prefetch) as outcomes:
            for _, logits, _ in outcomes:
                yield logits

    def _outcomes(
        self, state: TrainState, dataset: Dataset, kept: Admit | None, prefetch: int
    ) -> contextlib.closing[Outcomes]:
        check_alive(state)
        if self._its_store() is not None:
            check_prefetch(prefetch)
            assert self._reader is not None
            return contextlib.closing(
                forward_stored(self.program, self._reader, state, dataset, kept)
            )
        return contextlib.closing(
            forward(self.program, self._eval_lockstep, state, dataset, kept, prefetch)
        )

    def _one_admitted(self, batch: Batch) -> Iterator[Batch]:
        """What the policy leaves of a batch; where others may have samples, one may be empty."""
        is_empty = batch.num_samples == 0 and is_shared(self.emb.mesh)
        kept = batch if is_empty else self._admitted(batch)
        if kept is not None:
            yield kept

    def _admitted(self, batch: Batch) -> Batch | None:
        """What the policy for bad samples leaves of a batch."""
        return admit(batch, self.on_bad_sample, self.program.wants_probabilities)


def _let_save_end(checkpoint: CheckpointManager | None) -> None:
    """Waits for a save in the background; what stopped the run is told, not what stopped it."""
    with contextlib.suppress(SaveError):
        if checkpoint is not None:
            checkpoint.wait()


def _tell_of(reporter: Reporter, restored: Restored) -> None:
    reporter.note(f"resumed at step {restored.step:,}")
    if restored.new:
        reporter.note(f"not in the checkpoint, left at initial values: {', '.join(restored.new)}")
    if restored.changed:
        reporter.note(f"learning rates that have changed: {', '.join(restored.changed)}")


def _known_steps(dataset: Dataset, epochs: int | None) -> int | None:
    try:
        return len(dataset) * (epochs or 1)  # type: ignore[arg-type]
    except TypeError:
        return None
