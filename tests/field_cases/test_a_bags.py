# SPDX-License-Identifier: Apache-2.0
"""Field cases A: empty bags and batches, pooling, per-id weights, features that share a table.

Decided here: a bag without ids (or with padding only) is 0; mean divides by the number of ids; a
batch without any id is an ordinary step; a batch without samples passes through the embedding
layer, and the trainer refuses it.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.testing import assert_trees_equal
from tests.field_cases.layers import (
    Layer,
    bits,
    counting,
    mesh_of,
    on_1_and_4,
    state_of,
    table,
    table_rows,
    trainer_on,
)
from tests.store.stores import Stored, dynamic

SCALES = {"sum": lambda n: 1.0, "mean": lambda n: 1.0 / n, "sqrtn": lambda n: n**-0.5}


@on_1_and_4
def test_a01_empty_bags_in_the_middle_and_at_the_end(devices):
    values, lengths = [0, 1, 2, 3], [1, 0, 2, 0, 1, 0]
    rows = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    grads = np.random.default_rng(2).normal(size=(6, 3)).astype(np.float32)
    features = [js.FeatureSpec(name, table(name, 5, 3), combiner=name) for name in SCALES]
    layer = Layer(features, dict.fromkeys(SCALES, rows), devices)
    batch = dict.fromkeys(SCALES, js.Ragged.from_lengths(values, lengths))
    acts, _ = layer.step(batch, dict.fromkeys(SCALES, grads))
    for name, scale in SCALES.items():
        want, moved, start = np.zeros((6, 3)), rows.astype(np.float64), 0
        for bag, length in enumerate(lengths):
            for value in values[start : start + length]:
                want[bag] += scale(length) * rows[value].astype(np.float64)
                moved[value] -= scale(length) * grads[bag].astype(np.float64)
            start += length
        np.testing.assert_allclose(acts[name], want, rtol=1e-6, atol=1e-7)
        assert not acts[name][[1, 3, 5]].any()
        np.testing.assert_allclose(layer.rows(name), moved, rtol=1e-6, atol=1e-6)
        assert bits(layer.rows(name)[4]) == bits(rows[4])


@pytest.mark.parametrize(("devices", "lengths"), [(1, [0]), (4, [0, 0, 0])], ids=str)
def test_a02_a_batch_without_any_id_is_an_ordinary_step(devices, lengths):
    features = [
        js.FeatureSpec("mean", table(optimizer=js.Adagrad(0.1)), combiner="mean"),
        js.FeatureSpec("sum", table("u", optimizer=js.Adam(0.1)), combiner="sum"),
    ]
    rows = {"t": counting(10, 2), "u": counting(10, 2)}
    trainer, state = trainer_on(devices, features, rows)
    before = jax.tree.map(np.array, state.embeddings)
    nothing = js.Ragged.from_lengths(np.zeros(0, np.int64), lengths)
    labels = np.ones(len(lengths))
    batch = js.Batch({"mean": nothing, "sum": nothing}, labels=labels)
    state, outcome = trainer.step(state, batch)
    assert float(outcome["loss"]) == pytest.approx(np.log1p(np.exp(-0.25)), rel=1e-6)
    assert int(state.step) == 1
    assert_trees_equal(jax.tree.map(np.array, state.embeddings), before)
    slope = 1 / (1 + np.exp(-0.25)) - 1
    assert float(state.params.bias[...][0]) == pytest.approx(0.25 - 0.5 * slope, rel=1e-6)


@on_1_and_4
def test_a03_no_samples_at_all(devices):
    assert js.Ragged.from_lists([]).row_splits.tolist() == [0]
    names = ["fixed", "bags", "padded"]
    combiners = {"fixed": {}, "bags": {"combiner": "mean"}, "padded": {"padding_id": -1}}
    features = [js.FeatureSpec(name, table(), **combiners[name]) for name in names]
    layer = Layer(features, {"t": counting(10, 2)}, devices)
    batch = {
        "fixed": np.zeros(0, np.int64),
        "bags": js.Ragged.from_lists([]),
        "padded": np.zeros((0, 3), np.int64),
    }
    acts, _ = layer.step(batch)
    assert {name: act.shape for name, act in acts.items()} == dict.fromkeys(names, (0, 2))
    assert bits(layer.rows()) == bits(counting(10, 2))


def test_a03_the_trainer_refuses_a_batch_without_samples():
    features = [js.FeatureSpec("f", table())]
    trainer, state = trainer_on(1, features, {"t": counting(10, 2)})
    empty = js.Batch({"f": np.zeros(0, np.int64)}, labels=np.zeros(0))
    with pytest.raises(ValueError, match="the batch has no samples"):
        trainer.step(state, empty)
    assert int(state.step) == 0


@on_1_and_4
def test_a03_a_feature_without_ids_beside_one_with(devices):
    features = [js.FeatureSpec("a", table()), js.FeatureSpec("b", table("u"), combiner="mean")]
    layer = Layer(features, {"t": counting(10, 2), "u": counting(10, 2)}, devices)
    batch = {"a": np.array([3, 0, 9, 3]), "b": js.Ragged.from_lists([[], [], [], []])}
    acts, _ = layer.step(batch)
    assert acts["a"].tolist() == [[3, 3], [0, 0], [9, 9], [3, 3]]
    assert acts["b"].tolist() == [[0, 0]] * 4
    want = counting(10, 2)
    np.add.at(want, [3, 0, 9, 3], -1.0)
    assert bits(layer.rows("t")) == bits(want)
    assert bits(layer.rows("u")) == bits(counting(10, 2))


@pytest.mark.parametrize("devices", [1, 8], ids=lambda n: f"mesh{n}")
def test_a05_fewer_samples_than_devices(devices):
    ids, bags = [2, 7, 2], [[1, 3], [], [3]]
    labels, dense = [1.0, 0.0, 1.0], np.float32([[0.5], [-1.0], [0.25]])
    rows = np.random.default_rng(3).normal(size=(10, 2)).astype(np.float32)
    features = [js.FeatureSpec("one", table()), js.FeatureSpec("bag", table(), combiner="mean")]
    trainer, state = trainer_on(devices, features, {"t": rows})
    batch = js.Batch({"one": np.array(ids), "bag": js.Ragged.from_lists(bags)}, dense, labels)

    logits, losses, moved = [], [], {r: rows[r].astype(np.float64) for r in range(10)}
    for one, bag, label, value in zip(ids, bags, labels, dense[:, 0], strict=True):
        pooled = sum((rows[i].astype(np.float64) for i in bag), np.zeros(2)) / max(len(bag), 1)
        logit = 0.25 + rows[one].astype(np.float64).sum() + pooled.sum() + float(value)
        logits.append(logit)
        losses.append(np.log1p(np.exp(-logit if label else logit)))
        slope = (1 / (1 + np.exp(-logit)) - label) / 3
        moved[one] = moved[one] - slope
        for i in bag:
            moved[i] = moved[i] - slope / len(bag)

    before = trainer.evaluate(state, [batch])
    assert before["num_samples"] == 3
    assert before["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    pairs = [(logits[p] > logits[1]) for p in (0, 2)]
    assert before["auc"] == pytest.approx(np.mean(pairs))
    state, outcome = trainer.step(state, batch)
    assert float(outcome["loss"]) == pytest.approx(np.mean(losses), rel=1e-6)
    want = np.array([moved[r] for r in range(10)])
    np.testing.assert_allclose(table_rows(trainer, state), want, rtol=1e-6, atol=1e-6)


@on_1_and_4
def test_a07_padding_alone_moves_no_optimizer(devices):
    rules = {"sgd": js.SGD(0.1), "adagrad": js.Adagrad(0.1), "adam": js.Adam(0.1)}
    rules["ftrl"] = js.Ftrl(0.1)
    features = [
        js.FeatureSpec(name, table(name, optimizer=rule), combiner="mean", padding_id=0)
        for name, rule in rules.items()
    ]
    layer = Layer(features, dict.fromkeys(rules, counting(10, 2)), devices)
    before = jax.tree.map(np.array, layer.state)
    acts, _ = layer.step(dict.fromkeys(rules, np.zeros((2, 3), np.int64)))
    assert all(not act.any() for act in acts.values())
    assert_trees_equal(jax.tree.map(np.array, layer.state), before)
    layer.step(dict.fromkeys(rules, np.array([[0, 4, 0], [0, 0, 0]])), step=1)
    for name in rules:
        moved = layer.rows(name) != counting(10, 2)
        assert moved.all(axis=1).tolist() == [r == 4 for r in range(10)]
        assert moved.sum() == 2


@on_1_and_4
def test_a09_mean_does_not_count_padding(devices):
    rows = np.float32([[1.0], [2.0], [3.0]])
    names = ["mean", "sum"]
    features = [
        js.FeatureSpec(name, table(name, 3, 1), combiner=name, padding_id=1) for name in names
    ]
    for samples in (1, 2):
        layer = Layer(features, dict.fromkeys(names, rows), devices)
        acts, _ = layer.step(dict.fromkeys(names, np.array([[0, 1, 2]] * samples)))
        assert acts["mean"].tolist() == [[2.0]] * samples
        assert acts["sum"].tolist() == [[4.0]] * samples
        assert layer.rows("mean").tolist() == [[1 - samples / 2], [2], [3 - samples / 2]]
        assert layer.rows("sum").tolist() == [[1 - samples], [2], [3 - samples]]


@on_1_and_4
def test_a12_weights_of_ids_have_gradients(devices):
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(10, 3)).astype(np.float32)
    bags, weights = [[7, 2, 7], [], [2]], [[0.5, -1.5, 2.0], [], [3.0]]
    coefficients = rng.normal(size=(3, 3)).astype(np.float32)
    features = [js.FeatureSpec(name, table(dim=3), combiner=name) for name in SCALES]
    layer = Layer(features, {"t": rows}, devices)
    ragged = js.Ragged.from_lists(bags, weights)
    _, got = layer.step(dict.fromkeys(SCALES, ragged), dict.fromkeys(SCALES, coefficients))

    def loss(scale, flat):
        total, at = 0.0, 0
        for bag, c in zip(bags, coefficients.astype(np.float64), strict=True):
            for key in bag:
                total += scale(len(bag)) * flat[at] * (rows[key].astype(np.float64) @ c)
                at += 1
        return total

    flat = np.array([w for bag in weights for w in bag])
    for name, scale in SCALES.items():
        for i in range(len(flat)):
            step = np.zeros(len(flat))
            step[i] = 1e-3
            slope = (loss(scale, flat + step) - loss(scale, flat - step)) / 2e-3
            assert got[name][i] == pytest.approx(slope, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("devices", [2, 4], ids=lambda n: f"mesh{n}")
def test_a13_mean_and_sum_features_over_cut_rows(devices):
    rng = np.random.default_rng(5)
    combiners = {"m1": "mean", "s1": "sum", "m2": "mean", "s2": "sum", "s3": "sum"}
    rows = {name: rng.integers(-64, 65, (16, 2)).astype(np.float32) / 64 for name in combiners}
    features = [
        js.FeatureSpec(name, table(name, 16), combiner=how) for name, how in combiners.items()
    ]
    layer = Layer(features, rows, devices)
    # Bags of 1, 2, 4 and 8 ids: all sums and means are exact, so any lost id shows.
    bags = {name: [rng.integers(0, 16, n).tolist() for n in (8, 1, 4, 2)] for name in combiners}
    acts, _ = layer.step({name: js.Ragged.from_lists(lists) for name, lists in bags.items()})
    for name, how in combiners.items():
        moved = rows[name].copy()
        for sample, bag in enumerate(bags[name]):
            share = 1 / len(bag) if how == "mean" else 1.0
            total = sum(rows[name][key] for key in bag) * share
            assert acts[name][sample].tolist() == total.tolist()
            for key in bag:
                moved[key] -= share
        np.testing.assert_array_equal(layer.rows(name), moved)


@on_1_and_4
def test_a15_two_features_update_their_shared_table_once(devices):
    shared = table("T")
    features = [js.FeatureSpec("f1", shared), js.FeatureSpec("f2", shared)]
    layer = Layer(features, {"T": counting(10, 2)}, devices)
    assert list(layer.emb.tables) == ["T"]
    assert len(layer.state.slabs) == 1
    assert layer.state.slabs[0].shape[0] < 10 + devices
    layer.step({"f1": np.array([7, 7, 3]), "f2": js.Ragged.from_lists([[7], [], [3, 9]])})
    want = counting(10, 2)
    np.add.at(want, [7, 7, 3, 7, 3, 9], -1.0)
    assert (want[[7, 3, 9], 0] - [7, 3, 9]).tolist() == [-3, -2, -1]
    assert bits(layer.rows("T")) == bits(want)


@on_1_and_4
def test_a16_hash_buckets_cover_the_table_and_stay_inside(devices):
    keys = np.array([f"key{i}" for i in range(10**5)], object)
    reserved = table("reserved", 4, 1, keys=js.Hashed(exact_keys=["<pad>"]))
    free = table("free", 4, 1, keys=js.Hashed())
    features = [js.FeatureSpec("reserved", reserved), js.FeatureSpec("free", free)]
    emb = js.EmbeddingCollection(features, mesh=mesh_of(devices))
    state = state_of(emb, {"reserved": counting(4), "free": counting(4)})
    ids = emb.pack({"reserved": np.append(keys, "<pad>"), "free": np.append(keys, "<pad>")})
    acts, _ = emb.lookup(state, ids)
    rows = {name: np.asarray(act)[: len(keys) + 1, 0] for name, act in acts.items()}
    assert rows["reserved"][-1] == 0
    assert sorted(set(rows["reserved"][:-1].tolist())) == [1, 2, 3]
    assert sorted(set(rows["free"].tolist())) == [0, 1, 2, 3]


def test_a06_bags_of_one_device_are_all_empty():
    bags = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10], [], [], [], []]
    results = []
    for devices in (1, 2):
        feature = js.FeatureSpec("f", dynamic(optimizer=js.Adagrad(1.0)), combiner="mean")
        with Stored([feature], devices) as trained:
            acts, _ = trained.train([{"f": js.Ragged.from_lists(bags)}])
            assert trained.keys() == list(range(1, 11))
            assert not acts[0]["f"][4:].any()
            results.append((bits(acts[0]["f"]), bits(trained.read(range(1, 11)))))
    assert results[0] == results[1]


@on_1_and_4
def test_a14_each_feature_reads_its_own_table_whatever_its_tier(devices, tmp_path):
    tiers = {
        "z": None,
        "c": js.Tiers(device_rows=3),
        "m": js.Tiers(device_rows=3, host_rows=0, ssd=[tmp_path]),
        "a": js.Tiers(device_rows=8),
    }
    features = [
        js.FeatureSpec(
            name, dynamic(f"{name}{k}", 50, 2, tiers=tier, initializer=js.constant(float(k)))
        )
        for k, (name, tier) in enumerate(tiers.items())
    ]
    plain = table("plain", initializer=js.constant(9.0))
    with Stored([*features, js.FeatureSpec("b", plain)], devices) as trained:
        for start in (0, 3, 6):
            batch = {name: np.arange(start, start + 3) for name in [*tiers, "b"]}
            acts, _ = trained.train([batch], [dict.fromkeys(batch, 0.0)])
            for k, name in enumerate([*tiers, "b"]):
                assert (acts[0][name] == (9 if name == "b" else k)).all()
