# SPDX-License-Identifier: Apache-2.0
"""Collections and a dense model whose steps are compiled: every rule, placement, dtype.

Without pytest, as `compiled_checks`, which see.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxsparse as js

BATCH = 64
NUM_DENSE = 3
NUM_FEATURES = (13, 26, 100)

CAPACITY = 1 << 16
"""More than any batch needs: the top rung, for the need depends on where its rows lie."""

NUM_KEYS = 1000
"""Keys of the batch are below."""

MIN_ROWS = 1_000_000
"""Rows a device holds of every table: more than any other array of these steps has elements, and
so many that GPU schedules, which weigh arrays by their size, do not change with ten times more."""


@dataclasses.dataclass(frozen=True)
class HeavyBall:
    """A rule of the user's own."""

    learning_rate: float = dataclasses.field(compare=False)

    def init_slots(self, num_rows, dim):
        return {"velocity": jnp.zeros((num_rows, dim), jnp.float32)}

    def update(self, w, slots, g, lr, step):
        velocity = 0.5 * slots["velocity"] + g
        return w - lr * velocity, {"velocity": velocity}


class Tower(nnx.Module):
    """A small dense model whose number of parameters does not depend on that of features."""

    def __init__(self, width):
        self.hidden = nnx.Linear(width, 8, rngs=nnx.Rngs(0))
        self.logit = nnx.Linear(8 + NUM_DENSE, 1, rngs=nnx.Rngs(1))

    def __call__(self, acts, dense, train=False):
        flat = [act.reshape(act.shape[0], -1) for act in acts.values()]
        hidden = jax.nn.relu(self.hidden(jnp.concatenate(flat, axis=1)))
        return self.logit(jnp.concatenate([hidden, dense], axis=1))[:, 0]


RULES = {
    "sgd": js.SGD(0.1),
    "adagrad": js.Adagrad(0.1, l2=0.01),
    "rowwise_adagrad": js.RowwiseAdagrad(0.1, weight_decay=0.01),
    "adam": js.Adam(0.1),
    "adam_per_row": js.Adam(0.1, per_row_count=True),
    "ftrl": js.Ftrl(0.1),
    "heavy_ball": HeavyBall(0.1),
}


def collection(mesh, tables, ragged):
    """One feature a table; every ``ragged``-th is ragged and weighted, the others one id."""
    features = [js.FeatureSpec(f"f_{table.name}", table, combiner="mean") for table in tables]
    emb = js.EmbeddingCollection(
        features, mesh=mesh, exchange=js.Exchange(capacity=CAPACITY), device_bytes=2**40
    )
    rng = np.random.default_rng(0)
    columns = {}
    for index, feature in enumerate(features):
        if index % ragged == 0:
            values = rng.integers(0, NUM_KEYS, 2 * BATCH)
            weights = np.ones(values.size, np.float32) if index % (2 * ragged) == 0 else None
            columns[feature.name] = js.Ragged.from_lengths(values, np.full(BATCH, 2), weights)
        else:
            columns[feature.name] = rng.integers(0, NUM_KEYS, BATCH)
    return emb, columns


def sharded(mesh, name, rule, factor, dim=16, **options):
    """A table of which every device holds a part."""
    size = mesh.size * MIN_ROWS * factor
    return js.TableSpec(
        name,
        vocabulary_size=size,
        embedding_dim=dim,
        optimizer=rule,
        placement="sharded",
        **options,
    )


def whole(placement, name, rule, factor, dim=16, **options):
    """A table that is not cut."""
    return js.TableSpec(
        name,
        vocabulary_size=MIN_ROWS * factor,
        embedding_dim=dim,
        optimizer=rule,
        placement=placement,
        **options,
    )


def one_rule(mesh, rule, factor):
    """A single sharded table."""
    return collection(mesh, [sharded(mesh, "t", RULES[rule], factor)], ragged=1)


def every_rule(mesh, factor):
    """A sharded slab of each rule."""
    tables = [
        sharded(mesh, name, rule, factor, dim)
        for dim, (name, rule) in enumerate(RULES.items(), start=4)
    ]
    return collection(mesh, tables, ragged=2)


def every_placement(mesh, factor):
    """Replicated and single tables, a frozen one, and two tables in one slab."""
    tables = [
        whole("replicated", "copied", js.Adagrad(0.1), factor, 4),
        whole("replicated", "copied_too", js.Adam(0.1, per_row_count=True), factor, 5),
        whole("single", "single", js.Ftrl(0.1), factor, 6),
        sharded(mesh, "frozen", js.SGD(0.1), factor, 7, trainable=False),
        sharded(mesh, "first", js.RowwiseAdagrad(0.1), factor, 8),
        sharded(mesh, "second", js.RowwiseAdagrad(0.2), factor, 8),
        whole("single", "third", js.RowwiseAdagrad(0.2), factor, 8),
    ]
    return collection(mesh, tables, ragged=3)


def bfloat16(mesh, factor):
    """Half-precision tables."""
    tables = [
        sharded(mesh, "cut", js.RowwiseAdagrad(0.1), factor, dtype="bfloat16"),
        whole("replicated", "copied", js.RowwiseAdagrad(0.1), factor, dtype="bfloat16"),
    ]
    return collection(mesh, tables, ragged=2)


def many_features(mesh, count):
    """``count`` features, each of its own table, in one sharded and one replicated slab."""
    rule = js.Adagrad(0.1)
    tables = [
        whole("replicated", f"t{index}", rule, 1, 8)
        if index % 4 == 0
        else sharded(mesh, f"t{index}", rule, 1, 8)
        for index in range(count)
    ]
    return collection(mesh, tables, ragged=2)
