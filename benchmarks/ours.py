# SPDX-License-Identifier: Apache-2.0
"""The worker that times this project: ``python -m benchmarks.ours`` (see `workers`).

Every step starts at raw int64 ids in host memory. Steps follow one another as in any training loop
of JAX: the next batch is packed while the devices compute, and a step's time is that from one
step's results to the next one's. With ``waits`` in the workload nothing overlaps: the clock starts
at a batch's ids and stops when all its results are there.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxsparse as js
from benchmarks.workers import Task, peak_bytes, resident_bytes, serve
from benchmarks.workload import BOTTOM, NUM_DENSE, RATE, TOP, Workload
from jaxsparse.models import DLRM
from jaxsparse.train.step import train_step

RULES = {"adagrad": js.Adagrad, "rowwise_adagrad": js.RowwiseAdagrad}


@dataclasses.dataclass(frozen=True)
class UsersRule:
    """A shipped rule in the clothes of a user's own: no kernel knows it."""

    rule: Any

    @property
    def learning_rate(self) -> Any:
        return self.rule.learning_rate

    def init_slots(self, num_rows: int, dim: int) -> Any:
        return self.rule.init_slots(num_rows, dim)

    def update(self, *arguments: Any) -> Any:
        return self.rule.update(*arguments)


def collection(workload: Workload, users_rule: bool = False) -> js.EmbeddingCollection:
    """The tables, sharded over all devices; every row starts as zeros."""
    rule = RULES[workload.rule](RATE)
    tables = [
        js.TableSpec(
            f"t{number}",
            vocabulary_size=workload.rows,
            embedding_dim=workload.dim,
            optimizer=UsersRule(rule) if users_rule else rule,
            initializer=js.constant(0.0),
            placement="sharded",
        )
        for number in range(workload.tables)
    ]
    features = [js.FeatureSpec(f"f{number}", table) for number, table in enumerate(tables)]
    return js.EmbeddingCollection(features, mesh=js.make_mesh())


def raw_features(workload: Workload) -> list[dict[str, Any]]:
    """Ids of each batch by feature, ``[B]`` or ``[B, L]`` int64."""
    return [
        {f"f{n}": ids[:, 0] if workload.bag == 1 else ids for n, ids in enumerate(batch)}
        for batch in workload.draw()
    ]


def _sparse_step(
    emb: js.EmbeddingCollection, state: Any, ids: Any, grads: Any, step: Any
) -> tuple[Any, Any]:
    acts, residuals = emb.lookup(state, ids)
    # The update must wait for the activations, as gradients of a model do: XLA would copy the
    # tables to run it earlier.
    finite = jnp.isfinite(sum(act[0, 0] for act in acts.values()))
    return emb.update(state, residuals, grads, step=step, enabled=finite), acts


class Latest:
    """The step that was begun last, while the one before is waited for.

    Of its results one is held: they all come at once, and the others' memory is free sooner.
    """

    def __init__(self, waits: bool) -> None:
        self.waits = waits
        self.result: Any = None

    def follow(self, result: Any) -> None:
        """Waits for the step before this one; with ``waits`` for this one."""
        jax.block_until_ready(result if self.waits else self.result)
        self.result = result

    def settle(self) -> None:
        jax.block_until_ready(self.result)


class SparseTask:
    """Pack, lookup and update by gradients of one."""

    def __init__(self, workload: Workload, donate: bool = True, users_rule: bool = False) -> None:
        """Makes the tables and runs every batch once."""
        self.base = resident_bytes()
        self.latest = Latest(workload.waits)
        self.emb = collection(workload, users_rule)
        self.batches = raw_features(workload)
        self.ladder = js.Ladder()
        self.state = jax.block_until_ready(self.emb.init(jax.random.key(0)))
        self.program = jax.jit(
            partial(_sparse_step, self.emb), donate_argnums=(0,) if donate else ()
        )
        packed = self.pack(0)
        shapes = jax.eval_shape(self.emb.lookup, self.state, packed)[0]
        cut = jax.sharding.NamedSharding(self.emb.mesh, jax.sharding.PartitionSpec(self.emb.axes))
        self.grads = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype, device=cut), shapes)
        for number in range(len(self.batches)):
            self.step(number)
        self.facts = {
            "path": self.emb.path,
            "devices": self.emb.num_shards,
            "jax": jax.__version__,
            "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(self.state)),
        }

    def pack(self, number: int) -> Any:
        return self.emb.pack(self.batches[number % len(self.batches)], self.ladder)

    def step(self, number: int) -> None:
        packed = self.pack(number)
        self.state, acts = self.program(self.state, packed, self.grads, np.int32(number))
        self.latest.follow(acts["f0"])

    def settle(self) -> None:
        self.latest.settle()

    def set_threads(self, count: int) -> None:
        raise ValueError("XLA's threads are given when the process starts")

    def memory(self) -> dict[str, int]:
        """Resident now and at most, and before the tables; temporaries of the compiled step."""
        resident, peak = resident_bytes(), peak_bytes()
        lowered = self.program.lower(self.state, self.pack(0), self.grads, np.int32(0))
        analysis = lowered.compile().memory_analysis()
        return {
            "resident_bytes": resident,
            "peak_bytes": peak,
            "base_bytes": self.base,
            "temporary_bytes": analysis.temp_size_in_bytes,
        }


class DlrmTask:
    """`Trainer.step` of a raw batch."""

    def __init__(self, workload: Workload, donate: bool = True, users_rule: bool = False) -> None:
        """Makes model and tables and runs every batch once."""
        self.base = resident_bytes()
        self.latest = Latest(workload.waits)
        emb = collection(workload, users_rule)
        model = DLRM.for_features(
            emb.features, num_dense=NUM_DENSE, bottom=(*BOTTOM, workload.dim), top=TOP
        )
        self.trainer = js.Trainer(model, emb, optimizer=optax.adagrad(RATE))
        self.undonated = None if donate else jax.jit(train_step.__wrapped__, static_argnums=0)
        dense, labels = workload.dense()
        self.batches = [js.Batch(ids, dense, labels) for ids in raw_features(workload)]
        self.state = self.trainer.init(jax.random.key(0))
        for number in range(len(self.batches)):
            self.step(number)
        self.facts = {
            "path": emb.path,
            "devices": emb.num_shards,
            "jax": jax.__version__,
            "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(self.state.embeddings)),
        }

    def step(self, number: int) -> None:
        batch: Any = self.batches[number % len(self.batches)]
        if self.undonated is None:
            self.state, outcome = self.trainer.step(self.state, batch)
        else:
            packed = self.trainer.pack(batch)
            self.state, outcome = self.undonated(self.trainer.program, self.state, packed)
        self.latest.follow(outcome["loss"])

    def settle(self) -> None:
        self.latest.settle()

    def set_threads(self, count: int) -> None:
        raise ValueError("XLA's threads are given when the process starts")

    def memory(self) -> dict[str, int]:
        """Resident now and at most, and before the tables."""
        return {
            "resident_bytes": resident_bytes(),
            "peak_bytes": peak_bytes(),
            "base_bytes": self.base,
        }


def prepare(workload: Workload, options: dict[str, Any]) -> Task:
    """The task of a workload; options ``donate`` and ``users_rule``."""
    made = SparseTask if workload.part == "sparse" else DlrmTask
    return made(workload, **options)


if __name__ == "__main__":
    serve(prepare)
