# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients and gradients of weights, against the oracle and finite differences."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.testing import assert_trees_equal
from tests import oracle
from tests.five_features import BAGS, ITEMS, RUNG, dyadic_grads, make, make_features, snapshot


@pytest.fixture(scope="module")
def emb(devices):
    return make(4)


# ---- sparse gradients -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "placement"),
    [
        (4, "replicated"),
        ((2, 2), "sharded"),
        *(pytest.param(*on, marks=pytest.mark.slow) for on in ((1, "sharded"), ((2, 2), "single"))),
    ],
    ids=str,
)
def test_two_merged_batches_are_one_large_batch(devices, placement):
    emb = make(devices, only=BAGS, placement=placement)
    first, second = make_features(0, only=BAGS), make_features(1, only=BAGS)
    both = {
        name: js.Ragged.concatenate([first[name], second[name]])
        if isinstance(first[name], js.Ragged)
        else np.concatenate([first[name], second[name]])
        for name in first
    }
    state = emb.init(jax.random.key(0))
    parts, all_grads = [], []
    for seed, features in enumerate((first, second)):
        acts, residuals = emb.lookup(state, emb.pack(features, rung=27))
        all_grads.append(dyadic_grads(acts, seed))
        parts.append(emb.row_grads(residuals, all_grads[-1]))
    acts, residuals = emb.lookup(state, emb.pack(both))
    grads = {name: np.concatenate([g[name] for g in all_grads]) for name in acts}
    merged = js.merge_row_grads(*parts)
    large = emb.row_grads(residuals, grads)
    np.testing.assert_allclose(js.row_grads_norm(merged), js.row_grads_norm(large), rtol=1e-6)
    got = snapshot(emb.apply(state, merged, step=0))
    want = snapshot(emb.apply(emb.init(jax.random.key(0)), large, step=0))
    # Sums of dyadic gradients are exact, so even Adagrad's rows agree to the bit.
    assert_trees_equal(got, want)


def sparse_oracle(emb, state, features):
    """An `OracleCollection` of the same rows, and its batch."""
    tables = {
        name: {
            "dim": spec.embedding_dim,
            "rule": "sgd",
            "learning_rate": 1.0,
            "trainable": spec.trainable,
            "rows": dict(enumerate(emb.read(state, name, np.arange(spec.vocabulary_size)))),
        }
        for name, spec in emb.tables.items()
    }
    described = [
        {
            "name": spec.name,
            "table": spec.table.name,
            "combiner": spec.combiner,
            "max_length": spec.max_length,
            "truncate": spec.truncate,
            "padding_id": spec.padding_id,
        }
        for spec in emb.features
    ]
    batch = {}
    for name, value in features.items():
        if not isinstance(value, js.Ragged):
            batch[name] = np.reshape(value, (len(value), -1)).tolist()
            continue
        bags = [bag.tolist() for bag in value]
        batch[name] = bags
        if value.weights is not None:
            splits = np.split(value.weights, value.row_splits[1:-1])
            batch[name] = (bags, [part.tolist() for part in splits])
    return oracle.OracleCollection(tables, described), batch


@pytest.mark.parametrize("devices", [1, 4], ids=str)
def test_norm_equals_the_oracles(devices):
    only = (*BAGS, "fixed")
    emb = make(devices, only=only, placement="replicated")
    state, features = emb.init(jax.random.key(0)), make_features(0, only=only)
    judge, batch = sparse_oracle(emb, state, features)
    acts, residuals = emb.lookup(state, emb.pack(features))
    grads = jax.tree.map(lambda a: np.asarray(a) + 1, acts)
    found = judge.row_grads(batch, grads)
    trained = [g for name, rows in found.items() if name != "fixed" for g, _ in rows.values()]
    want = np.sqrt(sum(np.sum(g**2) for g in trained))
    row_grads = emb.row_grads(residuals, grads)
    np.testing.assert_allclose(js.row_grads_norm(row_grads), want, rtol=1e-6)
    halved = js.scale_row_grads(row_grads, 0.5)
    np.testing.assert_allclose(js.row_grads_norm(halved), want / 2, rtol=1e-6)


def test_row_grads_hold_each_row_once(emb):
    state, features = emb.init(jax.random.key(0)), make_features(0)
    features["shown"][:] = 7
    acts, residuals = emb.lookup(state, emb.pack(features, rung=RUNG))
    row_grads = emb.row_grads(residuals, acts)
    for rows, num_rows in zip(row_grads.rows, row_grads.num_rows, strict=True):
        for shard in rows.addressable_shards:
            real = np.asarray(shard.data)
            real = real[real < num_rows]
            assert np.unique(real).size == real.size


# ---- gradients of weights ---------------------------------------------------------------------


def test_weight_grads_come_in_the_users_order(emb):
    features = make_features(0)
    rng = np.random.default_rng(1)
    lengths = [6, 0, 1, 4, 5, 2, 0, 3]  # longer than max_length=4: the head is cut off
    total = sum(lengths)
    features["clicked"] = js.Ragged.from_lengths(
        rng.integers(0, ITEMS, total), lengths, rng.normal(size=total)
    )
    state = emb.init(jax.random.key(0))
    judge, batch = sparse_oracle(emb, state, features)
    acts, residuals = emb.lookup(state, emb.pack(features))
    grads = {n: rng.normal(size=a.shape).astype(np.float32) for n, a in acts.items()}
    got = emb.weight_grads(residuals, grads)
    want, absolute = judge.weight_grads(batch, grads)["clicked"]
    assert got.keys() == {"clicked"} and got["clicked"].shape == (total,)
    oracle.assert_scaled(got["clicked"], want, absolute)
    assert not np.asarray(got["clicked"])[:2].any(), "values cut off have no gradient"
    after = emb.weight_grads(residuals, grads)
    state = emb.update(state, residuals, grads, step=0)
    assert_trees_equal(after, emb.weight_grads(residuals, grads))


def test_weight_grads_skip_padding(devices):
    item = js.TableSpec("item", vocabulary_size=9, embedding_dim=2, placement="sharded")
    feature = js.FeatureSpec("bag", item, padding_id=-1)
    emb = js.EmbeddingCollection([feature], mesh=js.make_mesh(devices=devices[:2]))
    state = emb.write(emb.init(jax.random.key(0)), "item", [1, 2], [[1, 2], [3, 4]])
    bags = js.Ragged.from_lists([[-1, 2], [1, -1]], weights=[[5.0, 1.0], [1.0, 7.0]])
    _, residuals = emb.lookup(state, emb.pack({"bag": bags}))
    grads = {"bag": np.float32([[1, 0], [1, 1]])}
    assert emb.weight_grads(residuals, grads)["bag"].tolist() == [0, 3, 3, 0]


def test_weight_grads_of_padding_alone(devices):
    item = js.TableSpec("item", vocabulary_size=9, embedding_dim=2)
    feature = js.FeatureSpec("bag", item, padding_id=-1)
    emb = js.EmbeddingCollection([feature], mesh=js.make_mesh(devices=devices[:1]))
    bags = js.Ragged.from_lists([[-1], [-1, -1]], weights=[[5.0], [1.0, 7.0]])
    acts, residuals = emb.lookup(emb.init(jax.random.key(0)), emb.pack({"bag": bags}))
    assert emb.weight_grads(residuals, acts)["bag"].tolist() == [0, 0, 0]


def test_weight_grads_are_central_differences(emb):
    features, state = make_features(0), emb.init(jax.random.key(0))
    clicked = features["clicked"]
    ids = emb.pack(features, rung=RUNG)
    acts, residuals = emb.lookup(state, ids)
    grads = dyadic_grads(acts, 0)
    got = np.asarray(emb.weight_grads(residuals, grads)["clicked"])

    def loss(weights):
        bag = js.Ragged(clicked.values, clicked.row_splits, weights)
        acts, _ = emb.lookup(state, emb.pack({**features, "clicked": bag}, rung=RUNG))
        return np.sum(np.asarray(acts["clicked"], np.float64) * grads["clicked"])

    for index in range(0, clicked.values.size, 3):
        step = np.zeros(clicked.values.size, np.float32)
        step[index] = 0.5
        difference = loss(clicked.weights + step) - loss(clicked.weights - step)
        np.testing.assert_allclose(got[index], difference, rtol=1e-4, atol=1e-6)
