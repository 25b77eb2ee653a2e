# SPDX-License-Identifier: Apache-2.0
"""What the field cases share: collections whose tables hold given rows, one step, and a look.

Rows go in and come out as numpy arrays through the layout, so that a case compiles one program.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxsparse as js

# One of the two is quick: quick tests run on two Pythons, slow ones on one.
on_1_and_4 = pytest.mark.parametrize(
    "devices", [pytest.param(1, marks=pytest.mark.slow), 4], ids=lambda n: f"mesh{n}"
)


def mesh_of(devices):
    """A mesh of the first ``devices``, or of ``(nodes, per_node)``."""
    if isinstance(devices, tuple):
        nodes, per_node = devices
        return js.make_mesh(nodes, jax.devices()[: nodes * per_node])
    return js.make_mesh(devices=jax.devices()[:devices])


def table(name="t", rows=10, dim=2, optimizer=None, placement="sharded", **fields):
    optimizer = js.SGD(1.0) if optimizer is None else optimizer
    return js.TableSpec(
        name,
        vocabulary_size=rows,
        embedding_dim=dim,
        optimizer=optimizer,
        placement=placement,
        **fields,
    )


def places(emb, name):
    """Slab index and the place of every row of a table in the slab's global array."""
    slab, index = emb.layout.find(name)
    rows = np.arange(emb.tables[name].vocabulary_size)
    shard, local_row = slab.tables[index].locate(rows, emb.num_shards)
    return emb.layout.slabs.index(slab), shard * slab.rows_per_shard + local_row


def state_of(emb, tables):
    """A fresh state whose tables hold ``{name: rows [V, D]}``; rows of no id hold NaN."""
    slabs, slots = [], []
    for slab in emb.layout.slabs:
        size = slab.rows_per_shard * (1 if slab.replicated else emb.num_shards)
        slabs.append(np.full((size, slab.dim), np.nan, slab.dtype))
        new = slab.optimizer.init_slots(1, slab.dim) if slab.trainable else {}
        slots.append(
            {name: np.repeat(np.asarray(slot), size, axis=0) for name, slot in new.items()}
        )
    for name, rows in tables.items():
        slab, at = places(emb, name)
        slabs[slab][at] = np.asarray(rows)
    rates = {
        name: np.float32(1.0 if callable(rate) else rate)
        for name, spec in emb.tables.items()
        if spec.trainable
        for rate in [spec.optimizer.learning_rate]
    }
    shardings = jax.tree.map(
        lambda spec: NamedSharding(emb.mesh, spec),
        emb.state_spec(),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    # A copy made by jax: what it only borrowed from numpy could not be donated.
    state = jax.device_put(
        js.EmbeddingState(tuple(slabs), tuple(slots), rates, emb.layout_fingerprint), shardings
    )
    return jax.tree.map(jnp.copy, state)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _step(emb, state, ids, grads, step, enabled):
    acts, residuals = emb.lookup(state, ids)
    weight_grads = emb.weight_grads(residuals, grads)
    state = emb.update(state, residuals, grads, step=step, enabled=enabled)
    return acts, weight_grads, state


class Layer:
    """A collection and its state; ``tables`` are ``{name: rows [V, D]}``."""

    def __init__(self, features, tables, devices, **options):
        self.emb = js.EmbeddingCollection(features, mesh=mesh_of(devices), **options)
        self.state = state_of(self.emb, tables)

    def step(self, batch, grads=None, step=0, enabled=True):
        """Looks up and updates; returns activations and weight gradients without padding.

        ``grads`` are ``{feature: [B, ...]}``, ones for features left out.
        """
        ids = self.emb.pack(batch)
        full = {}
        for spec in self.emb.features:
            bag = () if spec.combiner else (spec.max_length,)
            full[spec.name] = np.zeros(
                (ids.padded_samples, *bag, spec.table.embedding_dim), np.float32
            )
            full[spec.name][: ids.num_samples] = (grads or {}).get(spec.name, 1.0)
        acts, weight_grads, self.state = _step(
            self.emb, self.state, ids, full, np.int32(step), np.bool_(enabled)
        )
        size = ids.num_samples
        values = {name: len(getattr(batch[name], "values", ())) for name in weight_grads}
        return (
            {name: np.asarray(act)[:size] for name, act in acts.items()},
            {name: np.asarray(grad)[: values[name]] for name, grad in weight_grads.items()},
        )

    def rows(self, name="t"):
        slab, at = places(self.emb, name)
        return np.array(self.state.slabs[slab])[at]

    def slots(self, name="t"):
        slab, at = places(self.emb, name)
        return {slot: np.array(array)[at] for slot, array in self.state.slots[slab].items()}


def bits(array):
    """For bitwise comparison: NaN equals NaN, -0.0 differs from 0.0."""
    return np.asarray(array).tobytes()


def counting(rows, dim=1):
    """Row r of a table is the constant r."""
    return np.repeat(np.arange(rows, dtype=np.float32)[:, None], dim, axis=1)


class Sum(nnx.Module):
    """Logit: the sum of all activations and dense values, plus a bias."""

    def __init__(self):
        self.bias = nnx.Param(np.float32([0.25]))

    def __call__(self, acts, dense, train):
        logits = self.bias[...] + sum(act.sum(axis=1) for act in acts.values())
        return logits if dense is None else logits + dense.sum(axis=1)


DENSE_OPTIMIZER = optax.sgd(0.5)


def _not_drawn(table):
    """The table without random initial rows, which would be replaced: drawing takes long to
    compile."""
    return dataclasses.replace(table, initializer=js.constant(0.0))


def trainer_on(devices, features, rows, exchange=None, **options):
    """A trainer of `Sum`, and its state with the given tables."""
    exchange = js.Exchange() if exchange is None else exchange
    features = [dataclasses.replace(spec, table=_not_drawn(spec.table)) for spec in features]
    emb = js.EmbeddingCollection(features, mesh=mesh_of(devices), exchange=exchange)
    trainer = js.Trainer(Sum(), emb, optimizer=DENSE_OPTIMIZER, **options)
    state = trainer.init(jax.random.key(0))
    return trainer, dataclasses.replace(state, embeddings=state_of(emb, rows))


def table_rows(trainer, state, name="t"):
    slab, at = places(trainer.emb, name)
    return np.array(state.embeddings.slabs[slab])[at]
