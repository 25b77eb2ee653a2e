# SPDX-License-Identifier: Apache-2.0
"""The trainer: what a step computes, and what evaluating and predicting give."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxsparse as js
from jaxsparse.testing import assert_trees_equal, count_compiles
from tests.field_cases.layers import table, table_rows
from tests.field_cases.networks import KEEP_GRADS, Tanh, assert_close, tanh_oracle
from tests.train.trainers import BATCHES, FEATURES, TwoTasks, batch_of, changed, trainer_of


@pytest.fixture(scope="module")
def trainer():
    return trainer_of()


# ---- a step -----------------------------------------------------------------------------------


def test_step_takes_a_raw_or_a_packed_batch_and_donates_the_state(trainer):
    raw, raw_outcome = trainer.step(trainer.init(jax.random.key(0)), BATCHES[0])
    state = trainer.init(jax.random.key(0))
    packed = trainer.pack(BATCHES[0])
    assert packed.num_samples == 8
    new, outcome = trainer.step(state, packed)
    assert_trees_equal(new, raw)
    assert float(outcome["loss"]) == float(raw_outcome["loss"])
    assert bool(outcome["finite"])
    assert int(new.step) == 1
    assert state.embeddings.slabs[0].is_deleted()


@pytest.mark.parametrize("devices", [1, 4, 8], ids=lambda n: f"mesh{n}")
def test_loss_and_dense_gradients_are_the_weighted_mean_of_the_oracle(devices):
    trainer = trainer_of(devices, optimizer=KEEP_GRADS)
    rng = np.random.default_rng(1)
    weights = rng.uniform(0.5, 2, 13).astype(np.float32)
    weights[4] = 0
    batch = changed(batch_of(5, 13), weights=weights)
    state = trainer.init(jax.random.key(0))
    one, bag = table_rows(trainer, state, "t"), table_rows(trainer, state, "u")
    x = np.zeros((13, 5))
    x[:, :2], x[:, 4] = one[batch.features["one"]], batch.dense[:, 0]
    for sample, keys in enumerate(batch.features["bag"]):
        for key in keys:
            x[sample, 2:4] += bag[key].astype(np.float64) / len(keys)
    loss, logits, grads, _ = tanh_oracle(Tanh(inputs=5), x, batch.labels, weights)

    metrics = trainer.evaluate(state, [batch])
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["num_samples"] == 12
    state, outcome = trainer.step(state, batch)
    assert float(outcome["loss"]) == pytest.approx(loss, rel=1e-6)
    assert_close(np.asarray(outcome["logits"])[:13], logits)
    for name, want in grads.items():
        assert_close(getattr(state.opt_state, name)[...], want)


def test_reduce_grads_decides_what_the_dense_optimizer_sees():
    def halved_sum(grads, axes):
        return jax.tree.map(lambda g: g / 2, js.sum_grads(grads, axes))

    grads = []
    for reduce_grads in (js.sum_grads, halved_sum):
        trainer = trainer_of(optimizer=KEEP_GRADS, reduce_grads=reduce_grads)
        state, _ = trainer.step(trainer.init(jax.random.key(0)), BATCHES[0])
        grads.append(state.opt_state)
    halves = jax.tree.map(lambda g: g / 2, grads[0])
    assert_trees_equal(grads[1], halves)
    assert np.abs(np.asarray(grads[0].out[...])).min() > 0


class InOrder(nnx.Module):
    """Goes through the activations in the order they come."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(1))

    def __call__(self, acts, dense, train):
        weighted = [(i + 1) * act[:, 0] for i, act in enumerate(acts.values())]
        return self.scale[...] * sum(weighted)


def test_features_come_in_declared_order_in_training_and_in_evaluation():
    features = [
        js.FeatureSpec(name, table(name, dim=1, initializer=js.constant(value)))
        for name, value in (("zebra", 1.0), ("ant", 10.0))
    ]
    trainer = trainer_of(model=InOrder(), features=features, link=lambda x: x)
    state = trainer.init(jax.random.key(0))
    batch = js.Batch({"zebra": np.array([1]), "ant": np.array([2])}, labels=[1])
    assert trainer.predict(state, [batch]).tolist() == [21.0]
    acts, _ = trainer.emb.lookup(state.embeddings, trainer.emb.pack(batch.features))
    assert list(acts) == ["zebra", "ant"]
    _, outcome = trainer.step(state, batch)
    assert float(outcome["logits"][0]) == 21.0


def test_several_tasks_add_their_losses_and_have_metrics_of_their_own():
    trainer = trainer_of(model=TwoTasks())
    batch = batch_of(1)
    labels = {"click": batch.labels, "buy": np.resize([0, 1, 1], 8)}
    batch = changed(batch, labels=labels)
    logits = {"click": batch.dense[:, 0].astype(np.float64)}
    logits["buy"] = logits["click"] - 1
    want = {}
    for task, values in logits.items():
        want[task] = np.logaddexp(0, np.where(batch.labels[task] == 1, -values, values)).mean()
    result = trainer.fit([batch], steps=1, eval_dataset=[batch], progress=False)
    train, evaluated = result.history
    assert train["loss"] == pytest.approx(sum(want.values()), rel=1e-6)
    assert "auc" not in train
    assert {f"{task}/auc" for task in labels} < set(evaluated)
    state = trainer.init(jax.random.key(0))
    metrics = trainer.evaluate(state, [batch, batch])
    for task in labels:
        assert metrics[f"{task}/logloss"] == pytest.approx(want[task], rel=1e-6)
    got = trainer.predict(state, [batch, batch])
    assert {task: values.shape for task, values in got.items()} == {"click": (16,), "buy": (16,)}
    assert_close(got["buy"][:8], 1 / (1 + np.exp(-logits["buy"])))


class Noisy(nnx.Module):
    """BatchNorm and Dropout before a linear layer."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(2, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, acts, dense, train):
        x = self.norm(acts["one"], use_running_average=not train)
        return self.out(self.dropout(x, deterministic=not train))[:, 0]


def test_batch_norm_and_dropout_train():
    features = FEATURES[:1]
    trainer = trainer_of(2, model=Noisy(nnx.Rngs(0)), features=features)
    keys = np.arange(8) % 4
    # Both devices have the same samples: in training only dropout tells them apart.
    batch = js.Batch({"one": keys}, labels=keys % 2)
    state = trainer.init(jax.random.key(0))
    before = trainer.evaluate(state, [batch])["loss"]
    assert (
        trainer.predict(state, [batch])[:4].tolist() == trainer.predict(state, [batch])[4:].tolist()
    )
    first_logits = []
    for _ in range(40):
        state, outcome = trainer.step(state, batch)
        first_logits.append(tuple(np.asarray(outcome["logits"]).tolist()))
    assert first_logits[0][:4] != first_logits[0][4:]
    assert len({logits[:4] for logits in first_logits}) > 30
    assert float(state.model_state[1].norm.mean[...][0]) != 0
    assert trainer.evaluate(state, [batch])["loss"] < before

    again, other = (trainer.init(jax.random.key(seed)) for seed in (0, 1))
    other = dataclasses.replace(other, embeddings=trainer.init(jax.random.key(0)).embeddings)
    _, outcome = trainer.step(again, batch)
    assert tuple(np.asarray(outcome["logits"]).tolist()) == first_logits[0]
    _, outcome = trainer.step(other, batch)  # the same tables, other masks
    assert tuple(np.asarray(outcome["logits"]).tolist()) != first_logits[0]


def test_trainers_of_equal_parts_share_programs(trainer):
    trainer.step(trainer.init(jax.random.key(0)), BATCHES[0])
    other = trainer_of()
    state = other.init(jax.random.key(0))
    with count_compiles() as count:
        other.step(state, BATCHES[0])
    assert count.programs == 0


# ---- evaluate and predict ---------------------------------------------------------------------


def test_predict_keeps_order_and_number(trainer):
    state = trainer.init(jax.random.key(0))
    whole = batch_of(9, 21)
    parts = [whole.take(np.arange(start, min(start + 8, 21))) for start in (0, 8, 16)]
    got = trainer.predict(state, parts)
    assert (got.shape, got.dtype) == ((21,), np.float32)
    singly = np.concatenate([trainer.predict(state, [part]) for part in parts[::-1]])
    assert got.tolist() == [*singly[13:], *singly[5:13], *singly[:5]]
    assert len(set(got.tolist())) == 21
    assert trainer.predict(state, []).shape == (0,)


def test_evaluate_leaves_out_batches_without_samples(trainer):
    state = trainer.init(jax.random.key(0))
    empty = BATCHES[0].take([])
    assert trainer.evaluate(state, [empty, BATCHES[0]]) == trainer.evaluate(state, BATCHES[:1])
    with pytest.raises(ValueError, match="evaluate: the dataset has no samples"):
        trainer.evaluate(state, [empty])
    weightless = dataclasses.replace(BATCHES[0], weights=np.zeros(BATCHES[0].num_samples))
    with pytest.raises(ValueError, match=r"evaluate: all \d+ samples have weight 0: there is noth"):
        trainer.evaluate(state, [weightless])


def test_labels_that_are_no_classes_have_a_loss_and_no_auc(trainer):
    state = trainer.init(jax.random.key(0))
    soft = changed(BATCHES[1], labels=np.linspace(0, 1, 8))
    # Also where only some batches have such labels: the AUC of the others is not that of all.
    for data in ([soft], [BATCHES[0], soft], [soft, BATCHES[0]]):
        metrics = trainer.evaluate(state, data)
        assert set(metrics) == {"loss", "num_samples"}
    history = trainer.fit([BATCHES[0], soft], epochs=1, progress=False).history
    assert "auc" not in history[0]
    masked = changed(
        BATCHES[0], labels=np.r_[-1, BATCHES[0].labels[1:]], weights=np.r_[0, np.ones(7)]
    )
    assert trainer.evaluate(state, [masked])["num_samples"] == 7
    assert "auc" in trainer.evaluate(state, [masked])
