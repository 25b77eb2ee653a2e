# SPDX-License-Identifier: Apache-2.0
"""A collection, its state and its row store; training steps of given gradients."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import numpy as np

import jaxsparse as js
from tests.field_cases.layers import mesh_of


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def train(emb, state, ids, grads, step):
    acts, residuals = emb.lookup(state, ids)
    return acts, emb.update(state, residuals, grads, step=step)


@partial(jax.jit, static_argnums=0)
def look(emb, state, ids):
    return emb.lookup(state, ids)[0]


def dynamic(name="t", capacity=100, dim=2, optimizer=None, tiers=None, placement="sharded", **keys):
    """A table of Dynamic keys; ``keys`` are admission and eviction."""
    options = {"initializer": keys.pop("initializer")} if "initializer" in keys else {}
    return js.TableSpec(
        name,
        embedding_dim=dim,
        keys=js.Dynamic(capacity, **keys),
        optimizer=js.SGD(1.0) if optimizer is None else optimizer,
        tiers=tiers,
        placement=placement,
        **options,
    )


class Stored:
    """Features of stored tables (and others) trained on batches ``{feature: keys}``."""

    def __init__(self, features, devices=1, seed=0):
        mesh = devices if isinstance(devices, jax.sharding.Mesh) else mesh_of(devices)
        self.emb = js.EmbeddingCollection(features, mesh=mesh)
        self.state = self.emb.init(jax.random.key(seed))
        self.store = js.RowStore(self.emb, self.state)
        self.steps = 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.store.close()

    def train(self, batches, grads=None, **options):
        """Trains; returns the activations of each batch and the facts of each pass.

        ``grads`` are ``{feature: [B, ...]}`` by batch, ones for features left out.
        """
        grads = itertools.repeat({}) if grads is None else iter(grads)
        results, facts = [], []
        for p in self.store.passes(map(batch_of, batches), **options):
            self.state = self.store.enter(self.state, p)
            for packed in p:
                full = self._full(packed.ids, next(grads))
                step = np.int32(self.steps)
                acts, self.state = train(self.emb, self.state, packed.ids, full, step)
                results.append(unpadded(acts, packed))
                self.steps += 1
            facts.append(p.facts)
        return results, facts

    def evaluate(self, batches, **options):
        """Activations of each batch."""
        results = []
        for p in self.store.passes(map(batch_of, batches), train=False, **options):
            self.state = self.store.enter(self.state, p)
            results += [unpadded(look(self.emb, self.state, b.ids), b) for b in p]
        return results

    def read(self, keys, table="t"):
        return self.store.read(self.state, table, _array(keys))

    def slots(self, keys, table="t"):
        return self.store.read_slots(self.state, table, _array(keys))

    def keys(self, table="t"):
        return self.store.keys(table).tolist()

    def _full(self, ids, given):
        full = {}
        for spec in self.emb.features:
            bag = () if spec.combiner else (spec.max_length,)
            shape = (ids.padded_samples, *bag, spec.table.embedding_dim)
            full[spec.name] = np.zeros(shape, np.float32)
            full[spec.name][: ids.num_samples] = given.get(spec.name, 1.0)
        return full


def _array(keys):
    return np.array(keys) if isinstance(keys, range) else keys


def batch_of(features):
    if isinstance(features, js.Batch):
        return features
    size = len(next(iter(features.values())))
    return js.Batch(features, labels=np.zeros(size))


def unpadded(acts, packed):
    return {name: np.asarray(act)[: packed.num_samples] for name, act in acts.items()}
