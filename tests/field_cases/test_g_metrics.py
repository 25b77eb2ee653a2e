# SPDX-License-Identifier: Apache-2.0
"""Field cases G: metrics, from the model's logits on the mesh to the numbers `evaluate` returns.

The metrics themselves are tested in ``tests/train/test_metrics.py``; here padding, meshes and the
cut into batches must not show. Decided here: scores are logits, always; AUC is the exact share of
pairs; with one class it is nan.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxsparse as js
from tests.field_cases.layers import mesh_of, on_1_and_4, table

FEATURE = js.FeatureSpec("f", table(dim=1, initializer=js.constant(0.0)))
OPTIMIZER = optax.sgd(0.1)


class Given(nnx.Module):
    """The logit is the dense value."""

    def __init__(self):
        self.unused = nnx.Param(jnp.zeros(1))

    def __call__(self, acts, dense, train):
        return dense[:, 0] + acts["f"][:, 0]


@pytest.fixture(scope="module")
def evaluate():
    """``evaluate(devices, logits, labels, batch_size)`` through a trainer on that mesh."""
    trainers = {}

    def run(devices, logits, labels, batch_size, weights=None):
        if devices not in trainers:
            emb = js.EmbeddingCollection([FEATURE], mesh=mesh_of(devices))
            trainer = js.Trainer(Given(), emb, optimizer=OPTIMIZER)
            trainers[devices] = trainer, trainer.init(jax.random.key(0))
        trainer, state = trainers[devices]
        logits, labels = np.asarray(logits, np.float32), np.asarray(labels)
        batches = []
        for start in range(0, len(logits), batch_size):
            part = slice(start, start + batch_size)
            ids = np.zeros(len(logits[part]), np.int64)
            some = None if weights is None else np.asarray(weights)[part]
            batches.append(js.Batch({"f": ids}, logits[part, None], labels[part], some))
        return trainer.evaluate(state, batches)

    return run


def midrank_auc(scores, labels):
    """By ranks in float64; ties share the mean of their ranks."""
    scores, labels = np.asarray(scores, np.float64), np.asarray(labels)
    distinct, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    assert len(distinct) == len(counts)
    positives = int(labels.sum())
    negatives = len(labels) - positives
    return (ranks[labels == 1].sum() - positives * (positives + 1) / 2) / (positives * negatives)


def logloss(logits, labels):
    logits = np.asarray(logits, np.float64)
    return np.logaddexp(0, np.where(np.asarray(labels) == 1, -logits, logits)).mean()


@on_1_and_4
def test_g01_scores_crowded_near_zero_are_told_apart(evaluate, devices):
    rng = np.random.default_rng(1)
    for logits in (rng.uniform(-9, -7, 10_000), np.log(rng.uniform(1e-4, 1e-3, 10_000))):
        logits = logits.astype(np.float32)
        labels = rng.random(10_000) < 0.2 + 0.1 * (logits - logits.mean())
        got = evaluate(devices, logits, labels, 5000)
        assert got["auc"] == pytest.approx(midrank_auc(logits, labels), abs=1e-9)
        assert 0.5 < got["auc"] < 1


@on_1_and_4
def test_g02_ties_do_not_follow_the_order_of_samples(evaluate, devices):
    labels = [0, 1, 0, 1]
    assert evaluate(devices, [0.0] * 4, labels, 4)["auc"] == 0.5
    levels, classes = np.array([-1, 0, 1, 0, 1, -1, 0, 0]), np.array([0, 1, 1, 0, 0, 1, 1, 0])
    want = midrank_auc(levels, classes)
    rng = np.random.default_rng(2)
    for _ in range(4):
        order = rng.permutation(8)
        got = evaluate(devices, levels[order], classes[order], 4)
        assert got["auc"] == pytest.approx(want)


@on_1_and_4
@pytest.mark.parametrize("label", [0, 1])
def test_g03_one_class_is_no_crash_and_no_number(evaluate, devices, label):
    logits = [0.5, -0.5, 2.0, -1.0]
    alone = evaluate(devices, logits, [label] * 4, 4)
    assert np.isnan(alone["auc"])
    assert np.isnan(alone["ne"])
    assert alone["logloss"] == pytest.approx(logloss(logits, [label] * 4), rel=1e-6)
    both = evaluate(devices, [*logits, *logits], [label] * 4 + [1 - label] * 4, 4)
    assert both["auc"] == 0.5


@pytest.mark.parametrize("devices", [1, 2, 8], ids=lambda n: f"mesh{n}")
def test_g05_padding_is_no_sample(evaluate, devices):
    rng = np.random.default_rng(3)
    logits = rng.normal(size=21).astype(np.float32)
    labels, weights = rng.integers(0, 2, 21), rng.uniform(0.5, 2, 21)
    got = evaluate(devices, logits, labels, 4)
    assert got["num_samples"] == 21
    assert got["auc"] == pytest.approx(midrank_auc(logits, labels), abs=1e-12)
    assert got["logloss"] == pytest.approx(logloss(logits, labels), rel=1e-6)
    assert got["loss"] == pytest.approx(logloss(logits, labels), rel=1e-6)
    assert got["calibration"] == pytest.approx(
        np.sum(1 / (1 + np.exp(-logits.astype(np.float64)))) / labels.sum(), rel=1e-6
    )
    weights[5] = 0
    weighted = evaluate(devices, logits, labels, 4, weights)
    losses = np.logaddexp(0, np.where(labels == 1, -logits, logits))
    assert weighted["num_samples"] == 20
    assert weighted["loss"] == pytest.approx(np.average(losses, weights=weights), rel=1e-6)


@on_1_and_4
def test_g06_logits_are_logits_whatever_their_values(evaluate, devices):
    logits, labels = [1.2, 0.9678, 1.7, 0.5], [1, 0, 1, 0]
    together = evaluate(devices, logits, labels, 4)
    singly = evaluate(devices, logits, labels, 1)
    assert singly == pytest.approx(together, rel=1e-12)
    assert together["logloss"] == pytest.approx(logloss(logits, labels), rel=1e-6)


def test_g07_many_pairs_do_not_overflow(evaluate):
    rng = np.random.default_rng(4)
    labels = np.repeat([0, 1], 60_000)
    logits = np.round(rng.normal(size=120_000) + labels, 2).astype(np.float32)
    got = evaluate(4, logits, labels, 60_000)["auc"]
    assert 0 <= got <= 1
    assert got == pytest.approx(midrank_auc(logits, labels), abs=1e-9)
