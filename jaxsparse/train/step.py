# SPDX-License-Identifier: Apache-2.0
"""The training step: one jit around one ``shard_map``, three explicit phases.

Autodiff never sees a table: it differentiates the dense model with respect to its parameters and
to the activations; the sparse half is written out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.moves import num_not_finite
from jaxsparse.packed_batch import PackedBatch
from jaxsparse.train.state import TrainState

Loss = Callable[[jax.Array, jax.Array], jax.Array]
ReduceGrads = Callable[[Any, tuple[str, ...]], Any]


def sum_grads(grads: Any, axes: tuple[str, ...]) -> Any:
    """The plain reduction: gradients summed over devices, in float32."""
    return lax.psum(jax.tree.map(lambda g: g.astype(jnp.float32), grads), axes)


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """Everything a step's program depends on; hashable, the static argument of its jit.

    Trainers made of equal parts share compiled programs.
    """

    graphdef: Any
    """Structure of the dense model, from ``nnx.split``."""
    emb: EmbeddingCollection
    optimizer: optax.GradientTransformation
    loss: Loss
    reduce_grads: ReduceGrads

    @property
    def wants_probabilities(self) -> bool:
        """Whether labels have to lie in [0, 1]: cross entropy has no minimum elsewhere."""
        return self.loss is optax.sigmoid_binary_cross_entropy

    def forward(
        self, params: Any, model_state: Any, acts: Any, dense: jax.Array | None, train: bool
    ) -> tuple[Any, Any]:
        """Logits of this device's samples and the model's new state."""
        keys, others = model_state
        model = nnx.merge(self.graphdef, params, keys, others, copy=True)
        # Differentiation sorts dicts by name: models that go by order must see one order.
        acts = {spec.name: acts[spec.name] for spec in self.emb.features}
        logits = model(acts, dense, train=train)
        _, _, others = nnx.state(model, nnx.Param, nnx.RngKey, ...)
        return logits, (keys, others)

    def losses(self, logits: Any, labels: Any) -> jax.Array:
        """Per-sample loss ``[b]``; summed over tasks where the model has several."""
        tasks, labelled = _tasks_of(logits), _tasks_of(labels)
        if tasks != labelled:
            raise ValueError(f"the model returns logits for {tasks}, labels are for {labelled}")
        if not isinstance(logits, dict):
            return self._task_losses("", logits, labels)
        parts = [
            self._task_losses(f" of task {task!r}", logits[task], labels[task]) for task in logits
        ]
        return sum(parts, jnp.float32(0))

    def _task_losses(self, of_task: str, logits: jax.Array, labels: jax.Array) -> jax.Array:
        """One task's losses; a shape that would broadcast is an error, not another result."""
        if logits.shape != labels.shape:
            raise ValueError(
                f"the model's logits{of_task} must have shape [b], one a sample: expected "
                f"{list(labels.shape)}, got {list(logits.shape)}"
            )
        losses = self.loss(logits, labels)
        if losses.shape != labels.shape:
            raise ValueError(
                f"the loss{of_task} must have shape [b], one a sample: expected "
                f"{list(labels.shape)}, got {list(losses.shape)}; leave the mean to the trainer"
            )
        return losses


def _tasks_of(columns: Any) -> str:
    return f"the tasks {sorted(columns)}" if isinstance(columns, dict) else "one unnamed task"


def _local_step(
    program: StepProgram, state: TrainState, batch: PackedBatch
) -> tuple[TrainState, dict[str, Any]]:
    emb = program.emb
    # The loss is a mean over the global weight, so gradients are summed, never rescaled.
    total_weight = lax.psum(jnp.sum(batch.weights), emb.axes)
    scale = batch.weights / jnp.where(total_weight > 0, total_weight, 1)
    acts, residuals = emb.local.lookup(state.embeddings, batch.ids)
    model_state = _fold_device(state.model_state, emb.axes)

    def loss_fn(params: Any, acts: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        logits, (_, others) = program.forward(params, model_state, acts, batch.dense, train=True)
        losses = program.losses(logits, batch.labels)
        # A padded sample must not turn the sum into NaN: 0 * inf.
        return jnp.sum(jnp.where(scale > 0, losses, 0) * scale), (logits, others)

    (loss, (logits, others)), (dense_grads, act_grads) = jax.value_and_grad(
        loss_fn, argnums=(0, 1), has_aux=True
    )(state.params, acts)
    dense_grads = program.reduce_grads(dense_grads, emb.axes)
    num_bad = sum(jnp.sum(~jnp.isfinite(leaf)) for leaf in jax.tree.leaves((loss, dense_grads)))
    # A gradient that is not finite moves its rows to what is not; rules, schedules and a narrow
    # wire can make that of finite ones too.
    moves = emb.local.moves(
        state.embeddings, emb.local.row_grads(residuals, act_grads), step=state.step
    )
    num_bad = num_bad + num_not_finite(moves, emb) + ~jnp.isfinite(total_weight)
    loss, num_bad = lax.psum((loss, jnp.asarray(num_bad, jnp.float32)), emb.axes)
    finite = num_bad == 0

    updates, opt_state = program.optimizer.update(dense_grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    embeddings = emb.local.write(state.embeddings, moves, enabled=finite)
    others = _mean_over_devices(others, emb.axes)
    keys, old_others = state.model_state

    def keep_if_bad(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

    new_state = TrainState(
        step=state.step + finite.astype(jnp.int32),
        params=keep_if_bad(params, state.params),
        model_state=(keys, keep_if_bad(others, old_others)),
        opt_state=keep_if_bad(opt_state, state.opt_state),
        embeddings=embeddings,
        rng=state.rng,
    )
    return new_state, {"loss": loss, "finite": finite, "logits": logits}


def _fold_device(model_state: Any, axes: tuple[str, ...]) -> Any:
    """Dropout must differ between devices: their samples differ."""
    keys, others = model_state
    device = lax.axis_index(axes)
    return jax.tree.map(lambda key: jax.random.fold_in(key, device), keys), others


def _mean_over_devices(others: Any, axes: tuple[str, ...]) -> Any:
    """Batch statistics are averaged; counters advance alike on all devices."""

    def reduce(leaf: jax.Array) -> Any:
        return lax.pmean(leaf, axes) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(reduce, others)


def state_spec(emb: EmbeddingCollection, state: TrainState) -> TrainState:
    """PartitionSpec of every leaf of a train state."""
    whole: Any = PartitionSpec()
    spec: TrainState = jax.tree.map(lambda _: whole, state)
    return dataclasses.replace(spec, embeddings=emb.state_spec())


# By default XLA lets one collective be under way at a time: the exchange of gradients would wait
# for the dense reduction and overlap with nothing. For A100 it also has to be told to hide latency
# at all. CPUs do not read these options.
OPTIONS = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    "xla_gpu_enable_latency_hiding_scheduler": True,
}


@partial(jax.jit, static_argnums=0, donate_argnums=1, compiler_options=OPTIONS)
def train_step(
    program: StepProgram, state: TrainState, batch: PackedBatch
) -> tuple[TrainState, dict[str, Any]]:
    """One step. The state is donated; a step whose loss or gradients are not finite changes no
    bit of it, its step counter included, and says ``finite=False``.

    Returns:
        The new state, and ``loss`` (float32 scalar: weighted mean over the global batch, before
        the update), ``finite`` (bool) and ``logits`` (``[B']``, cut over the mesh, or a dict).
    """
    emb = program.emb
    cut, whole = PartitionSpec(emb.axes), PartitionSpec()
    spec = state_spec(emb, state)
    out = (spec, {"loss": whole, "finite": whole, "logits": cut})
    result: tuple[TrainState, dict[str, Any]] = jax.shard_map(
        partial(_local_step, program),
        mesh=emb.mesh,
        in_specs=(spec, batch.spec(emb)),
        out_specs=out,
        check_vma=False,
    )(state, batch)
    return result


@partial(jax.jit, static_argnums=0)
def eval_step(program: StepProgram, state: TrainState, batch: PackedBatch) -> tuple[Any, jax.Array]:
    """Logits ``[B']`` (or a dict) and per-sample losses ``[B']``; changes nothing."""
    emb = program.emb

    def local(state: TrainState, batch: PackedBatch) -> tuple[Any, jax.Array]:
        acts, _ = emb.local.lookup(state.embeddings, batch.ids)
        logits, _ = program.forward(state.params, state.model_state, acts, batch.dense, train=False)
        return logits, program.losses(logits, batch.labels)

    cut = PartitionSpec(emb.axes)
    result: tuple[Any, jax.Array] = jax.shard_map(
        local,
        mesh=emb.mesh,
        in_specs=(state_spec(emb, state), batch.spec(emb)),
        out_specs=(cut, cut),
        check_vma=False,
    )(state, batch)
    return result
