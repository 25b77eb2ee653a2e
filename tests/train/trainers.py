# SPDX-License-Identifier: Apache-2.0
"""A small trainer with two features, and batches for it."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxsparse as js
from tests.field_cases.layers import mesh_of, table
from tests.field_cases.networks import Tanh

FEATURES = (
    js.FeatureSpec("one", table(optimizer=js.Adagrad(0.1))),
    js.FeatureSpec("bag", table("u", optimizer=js.Adagrad(0.1)), combiner="mean"),
)
OPTIMIZER = optax.adam(0.05)


def collection(devices, features=FEATURES):
    return js.EmbeddingCollection(features, mesh=mesh_of(devices))


def trainer_of(devices=4, *, model=None, optimizer=OPTIMIZER, features=FEATURES, **options):
    model = Tanh(inputs=5) if model is None else model
    return js.Trainer(model, collection(devices, features), optimizer=optimizer, **options)


@functools.cache
def batch_of(seed, size=8, **columns):
    """A batch whose bags add up to as many ids each time, so that all share one program."""
    rng = np.random.default_rng(seed)
    lengths = np.resize([2, 0, 1], size)
    bags = js.Ragged.from_lengths(rng.integers(0, 10, lengths.sum()), lengths)
    one = rng.integers(0, 10, size)
    dense = rng.normal(size=(size, 1))
    return js.Batch({"one": one, "bag": bags}, dense, one % 2, **columns)


def changed(batch, **columns):
    return dataclasses.replace(batch, **columns)


BATCHES = [batch_of(seed) for seed in range(3)]


class TwoTasks(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(1))

    def __call__(self, acts, dense, train):
        logit = self.scale[...] * dense[:, 0]
        return {"click": logit + 0 * acts["one"][:, 0], "buy": logit - 1.0}
