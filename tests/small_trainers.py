# SPDX-License-Identifier: Apache-2.0
"""Trainers of the least dense model there is, their tables, and batches for them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxsparse as js

DENSE_OPTIMIZER = optax.sgd(0.01)
"""One for all trainers: optax transformations are equal only to themselves."""


class Sum(nnx.Module):
    """Logit: the sum of all activations times one weight."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones(()))

    def __call__(self, acts, dense, train=False):
        return self.weight * sum(act.sum(axis=range(1, act.ndim)) for act in acts.values())


def make_trainer(mesh, features, **options):
    emb = js.EmbeddingCollection(features, mesh=mesh, **options)
    return js.Trainer(Sum(), emb, optimizer=DENSE_OPTIMIZER)


def table(name="t", rows=1000, dim=4, rule=None, **options):
    options = {"placement": "sharded", **options}
    return js.TableSpec(
        name,
        vocabulary_size=rows,
        embedding_dim=dim,
        optimizer=js.Adagrad(0.05) if rule is None else rule,
        **options,
    )


def ragged(rng, num_ids, num_bags, num_keys=1000):
    """Exactly ``num_ids`` keys in ``num_bags`` bags, some of them empty."""
    inner = np.sort(rng.integers(0, num_ids + 1, num_bags - 1))
    splits = np.concatenate([[0], inner, [num_ids]])
    return js.Ragged(rng.integers(0, num_keys, num_ids), splits)


def batch_of(features, num_samples):
    labels = np.arange(num_samples, dtype=np.float32) % 2
    return js.Batch(features, labels=labels)
