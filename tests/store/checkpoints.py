# SPDX-License-Identifier: Apache-2.0
"""Row stores saved and taken up by others, of other tiers and meshes."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np

import jaxsparse as js
from jaxsparse.ckpt import restore_state, save_state
from jaxsparse.ckpt.loading import load_state
from tests.store.stores import Stored, dynamic


@partial(jax.tree_util.register_dataclass, data_fields=("embeddings",), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Tables:
    """The least that can be saved."""

    embeddings: Any


SETUPS = {
    "device": lambda folder: None,
    "ram": lambda folder: js.Tiers(device_rows=16),
    "ssd": lambda folder: js.Tiers(device_rows=16, host_rows=8, ssd=[folder]),
}


def stored(tiers, devices=1, seed=0, capacity=100, optimizer=None, **keys):
    """A store of one table ``t`` of Dynamic keys that a bag and a plain feature share."""
    table = dynamic("t", capacity, 2, optimizer or js.Adagrad(0.1), tiers, **keys)
    features = [js.FeatureSpec("f", table), js.FeatureSpec("g", table)]
    return Stored(features, devices, seed)


def save(trained, path):
    return save_state(path, trained.emb, Tables(trained.state), trained.store)


def load(path, trained, **options):
    """Restores into a store; returns what the checkpoint lacked."""
    loaded = load_state(path, trained.emb, Tables(trained.state), store=trained.store, **options)
    trained.state = loaded.state.embeddings
    return loaded.new


def restore(path, trained, steps=0):
    state = restore_state(path, trained.emb, Tables(trained.state), trained.store)
    trained.state, trained.steps = state.embeddings, steps
    return trained


def contents(trained, table="t"):
    """Keys, rows, slots and counters by key, wherever rows lie."""
    keys = trained.store.keys(table)
    known = trained.store._tables[table].known
    rows = known.index.find(keys)
    return {
        "keys": keys,
        "numbers": rows,
        "rows": trained.read(keys, table),
        "slots": trained.slots(keys, table),
        "counts": known.counters.count[rows],
        "last": known.counters.last[rows],
        "hotness": known.hotness.of(rows) / np.float32(known.hotness.weight),
        "unknown": trained.read(np.arange(10**6, 10**6 + 4), table),
    }


def log(seed, num_batches, num_keys=60, size=8):
    """Batches whose keys are half of them the same few."""
    rng = np.random.default_rng(seed)

    def keys():
        hot = rng.random(size) < 0.5
        drawn = np.where(hot, rng.integers(0, 6, size), rng.integers(0, num_keys, size))
        return drawn.astype(np.uint64) * np.uint64(2**58 + 1)

    return [{"f": keys(), "g": keys()} for _ in range(num_batches)]
