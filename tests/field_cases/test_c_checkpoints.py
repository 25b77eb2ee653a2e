# SPDX-License-Identifier: Apache-2.0
"""Numbers that a checkpoint must not spoil: not finite states, and schedules."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxsparse as js
from jaxsparse.ckpt import SaveError


class Sum(nnx.Module):
    """The sum of all activations and a bias: every gradient is a power of two."""

    def __init__(self):
        self.bias = nnx.Param(jnp.zeros(()))

    def __call__(self, acts, dense, train=False):
        return acts["id"].sum(-1) + self.bias


def make_trainer(dense_rate, sparse_rate):
    table = js.TableSpec("t", vocabulary_size=8, embedding_dim=2, optimizer=js.SGD(sparse_rate))
    emb = js.EmbeddingCollection(
        [js.FeatureSpec("id", table)], mesh=js.make_mesh(devices=jax.devices()[:2])
    )
    return js.Trainer(Sum(), emb, optimizer=optax.sgd(dense_rate), loss=lambda x, y: x + 0 * y)


DATA = js.data.from_arrays({"id": np.zeros(4, int), "label": [0, 1, 0, 1]}, batch_size=4)


def test_c22_a_state_that_is_not_finite_never_becomes_the_latest(tmp_path):
    trainer = make_trainer(lambda step: jnp.where(step < 4, 0.5, jnp.inf), 0.5)
    manager = js.CheckpointManager(tmp_path, every=1, keep=3)
    message = (
        r"000000005: cannot be saved: dense/params.bias: 1 values are not finite; the state is "
        r"not saved; older saves are as they were"
    )
    with pytest.raises(SaveError, match=message):
        trainer.fit(DATA, steps=9, checkpoint=manager, progress=False)
    assert manager.steps() == [2, 3, 4]
    healthy = manager.restore(trainer.emb, trainer.init(jax.random.key(1))).state
    assert int(healthy.step) == 4 and np.isfinite(float(healthy.params["bias"][...]))
    (slab,) = healthy.embeddings.slabs
    embeddings = dataclasses.replace(healthy.embeddings, slabs=(slab.at[0, 1].set(jnp.nan),))
    bad = dataclasses.replace(healthy, embeddings=embeddings, step=healthy.step + 1)
    with pytest.raises(SaveError, match="tables/t/rows: 1 values are not finite; the state is not"):
        manager.save(trainer.emb, bad)
    assert manager.latest() == 4


def test_c23_schedules_go_on_without_a_repeat_or_a_gap(tmp_path):
    trainer = make_trainer(lambda step: step + 1.0, lambda step: step + 1.0)
    bias, row, rates = [], [], []
    for steps in range(1, 7):
        manager = js.CheckpointManager(tmp_path / "half", every=100)
        state = trainer.fit(DATA, steps=steps, checkpoint=manager, progress=False).state
        bias.append(float(state.params["bias"][...]))
        row.append(trainer.emb.read(state.embeddings, "t", [0])[0, 0])
        rates.append(int(state.step))
    assert rates == [1, 2, 3, 4, 5, 6]
    # Every gradient is 1, so a step moves by its learning rate.
    np.testing.assert_array_equal(-np.diff(bias), [2, 3, 4, 5, 6])
    np.testing.assert_allclose(-np.diff(row), [2, 3, 4, 5, 6], rtol=1e-6)
    assert bias[0] == -1
