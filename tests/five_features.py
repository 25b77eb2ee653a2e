# SPDX-License-Identifier: Apache-2.0
"""A collection of five features, or some of them, and batches and gradients for it."""

from __future__ import annotations

import jax
import numpy as np

import jaxsparse as js

USERS, ITEMS = 3_000, 500

RUNG = 16
"""Holds every batch of `make_features` with 8 samples, so that they share programs."""


def make_specs(optimizer=None, **item_fields):
    """Two slabs that travel and a frozen one; ``clicked`` has weights."""
    optimizer = js.Adagrad(0.25) if optimizer is None else optimizer
    item_fields = {"placement": "sharded", "optimizer": optimizer, **item_fields}
    item = js.TableSpec("item", vocabulary_size=ITEMS, embedding_dim=4, **item_fields)
    user = js.TableSpec("user", vocabulary_size=USERS, embedding_dim=3, optimizer=js.SGD(0.5))
    fixed = js.TableSpec("fixed", vocabulary_size=20, embedding_dim=4, trainable=False)
    return [
        js.FeatureSpec("shown", item),
        js.FeatureSpec("clicked", item, combiner="mean", max_length=4, truncate="tail"),
        js.FeatureSpec("user", user, combiner="sqrtn", padding_id=-1),
        js.FeatureSpec("history", item, combiner=None, max_length=3),
        js.FeatureSpec("fixed", fixed),
    ]


def make(devices, optimizer=None, exchange=None, only=None, **item_fields):
    """A collection over the first ``devices``, or over ``(nodes, per_node)``.

    ``only`` names the features to keep: fewer slabs compile sooner.
    """
    nodes, size = devices if isinstance(devices, tuple) else (None, devices)
    mesh = js.make_mesh(nodes, jax.devices()[: size * (nodes or 1)])
    features = make_specs(optimizer, **item_fields)
    features = [f for f in features if only is None or f.name in only]
    exchange = js.Exchange() if exchange is None else exchange
    return js.EmbeddingCollection(features, mesh=mesh, exchange=exchange)


BAGS = ("shown", "clicked")
"""The features of the smaller collections: one slab, with weights."""


def make_features(seed, samples=8, only=None):
    """Bags of the same lengths for every seed, so that one program serves them."""
    rng = np.random.default_rng(seed)
    lengths = np.resize([1, 0, 4, 4], samples)
    num_clicked = int(lengths.sum())
    user = rng.integers(0, USERS, (samples, 4))
    user[1::4] = -1
    features = {
        "shown": rng.integers(0, ITEMS, samples),
        "clicked": js.Ragged.from_lengths(
            rng.integers(0, ITEMS, num_clicked), lengths, rng.integers(1, 4, num_clicked) / 2
        ),
        "user": user,
        "history": js.Ragged.from_lengths(rng.integers(0, ITEMS, 2 * samples), np.full(samples, 2)),
        "fixed": rng.integers(0, 20, samples),
    }
    return {name: value for name, value in features.items() if only is None or name in only}


def dyadic_grads(acts, seed):
    """Gradients k/64, whose sums are exact in any order."""
    rng = np.random.default_rng(seed)
    return {n: (rng.integers(-32, 33, a.shape) / 64).astype(np.float32) for n, a in acts.items()}


def snapshot(state):
    """Copies of all leaves, which outlive a donation."""
    return jax.tree.map(np.array, state)
