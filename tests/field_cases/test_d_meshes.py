# SPDX-License-Identifier: Apache-2.0
"""Field cases D: meshes of every size, what is summed over devices, skew, capacity.

Decided here: no id is ever dropped. A capacity below a batch's need is an error that names both
numbers, before anything has changed; every sample counts once whatever the mesh pads.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import jaxsparse as js
from tests.field_cases.layers import (
    Layer,
    bits,
    counting,
    mesh_of,
    on_1_and_4,
    places,
    state_of,
    table,
    table_rows,
    trainer_on,
)
from tests.field_cases.networks import KEEP_GRADS, Tanh, assert_close, tanh_oracle


def on_meshes(*meshes, slow=()):
    cases = [*meshes, *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in slow)]
    return pytest.mark.parametrize("devices", cases, ids=lambda mesh: f"mesh{mesh}")


@on_meshes(1, 3, 8, slow=(2, 5, 7))
def test_d01_rows_need_not_divide_by_the_devices(devices):
    emb = js.EmbeddingCollection([js.FeatureSpec("f", table(rows=4091))], mesh=mesh_of(devices))
    rows = counting(4091, 2)
    state = state_of(emb, {"t": rows})
    assert bits(emb.read(state, "t", np.arange(4091))) == bits(rows)
    slab, at = places(emb, "t")
    # The rows that are some id's, shard by shard; all others hold NaN.
    real = [int(np.isfinite(np.asarray(s.data)[:, 0]).sum()) for s in shards(state.slabs[slab])]
    assert sum(real) == 4091 == len(set(at.tolist()))
    assert max(real) <= -(-4091 // devices)


def shards(array):
    return sorted(array.addressable_shards, key=lambda shard: shard.device.id)


@on_meshes(1, 8)
def test_d02_fewer_rows_and_samples_than_devices(devices):
    layer = Layer([js.FeatureSpec("f", table(rows=2, dim=3))], {"t": counting(2, 3)}, devices)
    ids = layer.emb.pack({"f": np.array([1])})
    _, residuals = layer.emb.lookup(layer.state, ids)
    nothing = layer.emb.layout.slabs[0].rows_per_shard
    asked = np.asarray(residuals.asked[0]).reshape(devices, -1)
    assert np.sum(asked != nothing) == 1
    assert (asked[2:] == nothing).all()
    owned = [np.isfinite(np.asarray(shard.data)).any() for shard in shards(layer.state.slabs[0])]
    assert owned == [True, True, *[False] * 6][:devices]
    acts, _ = layer.step({"f": np.array([1])})
    assert acts["f"].tolist() == [[1, 1, 1]]
    assert layer.rows().tolist() == [[0, 0, 0], [0, 0, 0]]


@on_1_and_4
def test_d03_a_batch_that_does_not_divide_by_the_devices(devices):
    trainer, state = trainer_on(devices, [js.FeatureSpec("f", table())], {"t": counting(10, 2)})
    first = js.Batch({"f": np.array([0, 1, 0, 1, 2])}, labels=[0, 1, 1, 0, 1])
    last = js.Batch({"f": np.array([3, 0, 1])}, labels=[1, 0, 0])
    rows, bias, all_losses = {r: 2.0 * r for r in range(10)}, 0.25, []
    for batch in (first, last):
        logits = np.array([rows[i] + bias for i in batch.features["f"]])
        losses = np.logaddexp(0, np.where(batch.labels == 1, -logits, logits))
        all_losses += losses.tolist()
    metrics = trainer.evaluate(state, [first, last])
    assert metrics["num_samples"] == 8
    assert metrics["loss"] == pytest.approx(np.mean(all_losses), rel=1e-6)
    for batch in (first, last):
        logits = np.array([rows[i] + bias for i in batch.features["f"]])
        losses = np.logaddexp(0, np.where(batch.labels == 1, -logits, logits))
        slopes = (1 / (1 + np.exp(-logits)) - batch.labels) / len(losses)
        for i, slope in zip(batch.features["f"], slopes, strict=True):
            rows[i] -= 2 * slope
        bias -= 0.5 * slopes.sum()
        state, outcome = trainer.step(state, batch)
        assert float(outcome["loss"]) == pytest.approx(losses.mean(), rel=1e-6)
    want = [rows[r] for r in range(10)]
    np.testing.assert_allclose(table_rows(trainer, state).sum(axis=1), want, rtol=1e-6)


@on_meshes(1, 4, slow=(2, 8, (2, 2)))
def test_d04_gradients_are_those_of_the_global_mean(devices):
    rng = np.random.default_rng(7)
    rows = (rng.normal(size=(10, 2)) / 16).astype(np.float32)
    features = [js.FeatureSpec("one", table()), js.FeatureSpec("bag", table(), combiner="mean")]
    emb = js.EmbeddingCollection(features, mesh=mesh_of(devices))
    model = Tanh(inputs=5)
    trainer = js.Trainer(model, emb, optimizer=KEEP_GRADS)
    one, bags = rng.integers(0, 10, 13), [rng.integers(0, 10, n % 4).tolist() for n in range(13)]
    labels, dense = rng.integers(0, 2, 13), rng.normal(size=(13, 1)).astype(np.float32)

    x = np.zeros((13, 5))
    x[:, :2], x[:, 4] = rows[one], dense[:, 0]
    for sample, bag in enumerate(bags):
        for key in bag:
            x[sample, 2:4] += rows[key].astype(np.float64) / len(bag)
    loss, logits, grads, x_grad = tanh_oracle(model, x, labels, np.ones(13))
    row_grads = np.zeros((10, 2))
    for sample, bag in enumerate(bags):
        row_grads[one[sample]] += x_grad[sample, :2]
        for key in bag:
            row_grads[key] += x_grad[sample, 2:4] / len(bag)

    state = trainer.init(jax.random.key(0))
    object.__setattr__(state, "embeddings", state_of(emb, {"t": rows}))
    batch = js.Batch({"one": one, "bag": js.Ragged.from_lists(bags)}, dense, labels)
    state, outcome = trainer.step(state, batch)
    assert float(outcome["loss"]) == pytest.approx(loss, rel=1e-6)
    assert_close(np.asarray(outcome["logits"])[:13], logits)
    for name, want in grads.items():
        assert_close(getattr(state.opt_state, name)[...], want)
    # The table's rule is SGD with rate 1: what is missing is the gradient.
    assert_close(rows - table_rows(trainer, state), row_grads)


@on_meshes((4, 2), slow=((1, 4),))
def test_d05_nothing_is_counted_twice_on_two_axes(devices):
    rows = counting(100, 2)
    trainer, state = trainer_on(devices, [js.FeatureSpec("f", table(rows=100))], {"t": rows})
    read = trainer.emb.read(state.embeddings, "t", np.arange(100))
    assert read.sum(dtype=np.float64) == rows.sum(dtype=np.float64) == 9900
    keys, labels = np.array([0, 1, 0, 2, 1]), np.array([0, 1, 1, 0, 0])
    metrics = trainer.evaluate(state, [js.Batch({"f": keys}, labels=labels)])
    logits = 0.25 + 2.0 * keys
    losses = np.logaddexp(0, np.where(labels == 1, -logits, logits))
    assert metrics["num_samples"] == 5
    assert metrics["loss"] == pytest.approx(losses.mean(), rel=1e-6)
    assert metrics["logloss"] == pytest.approx(losses.mean(), rel=1e-6)
    pairs = [
        (logits[p] > logits[n]) + (logits[p] == logits[n]) / 2 for p in (1, 2) for n in (0, 3, 4)
    ]
    assert metrics["auc"] == pytest.approx(np.mean(pairs))


def bag_of_twenty(devices):
    """One owner has all rows, one sample asks 20 of them."""
    spec = table(rows=64, placement="sharded" if devices == 1 else "single")
    bags = [list(range(20)), *[[] for _ in range(devices - 1)]]
    return js.FeatureSpec("f", spec), js.Ragged.from_lists(bags)


@on_1_and_4
def test_d08_a_capacity_five_rows_short_is_an_error(devices):
    feature, bags = bag_of_twenty(devices)
    mesh = mesh_of(devices)
    emb = js.EmbeddingCollection([feature], mesh=mesh, exchange=js.Exchange(capacity=15))
    with pytest.raises(ValueError, match="rung 15 is below the need 20"):
        emb.pack({"f": bags})
    trainer, state = trainer_on(
        devices, [feature], {"t": counting(64, 2)}, exchange=js.Exchange(capacity=15)
    )
    batch = js.Batch({"f": bags}, labels=np.zeros(devices))
    before = table_rows(trainer, state)
    with pytest.raises(ValueError, match="rung 15 is below the need 20"):
        trainer.step(state, batch)
    with pytest.raises(ValueError, match="rung 15 is below the need 20"):
        trainer.evaluate(state, [batch])
    assert bits(table_rows(trainer, state)) == bits(before)
    assert int(state.step) == 0


@on_1_and_4
@pytest.mark.parametrize("capacity", [None, 20], ids=["ladder", "exact"])
def test_d08_with_room_for_all_no_id_is_lost(devices, capacity):
    feature, bags = bag_of_twenty(devices)
    exchange = js.Exchange(capacity=capacity)
    layer = Layer([feature], {"t": counting(64, 2)}, devices, exchange=exchange)
    ids = layer.emb.pack({"f": bags})
    assert (ids.need, ids.rung >= 20) == (20, True)
    acts, _ = layer.step({"f": bags})
    assert acts["f"][0].tolist() == [190.0, 190.0]
    want = counting(64, 2)
    want[:20] -= 1
    assert bits(layer.rows()) == bits(want)


@on_1_and_4
def test_d09_padding_uses_up_no_capacity(devices):
    spec = table(placement="sharded" if devices == 1 else "single")
    feature = js.FeatureSpec("f", spec, padding_id=-1)
    ids = np.full((4, 10), -1)
    ids[0, [2, 5]], ids[2, 9], ids[3, 0] = [8, 3], 8, 1
    need = 3 if devices == 1 else 2
    exchange = js.Exchange(capacity=need)
    layer = Layer([feature], {"t": counting(10, 2)}, devices, exchange=exchange)
    packed = layer.emb.pack({"f": ids})
    asked = np.asarray(packed.slabs[0].rows)
    assert packed.need == need
    assert np.sum(asked != layer.emb.layout.slabs[0].rows_per_shard) == (3 if devices == 1 else 4)
    acts, _ = layer.step({"f": ids})
    assert acts["f"][:, 0].tolist() == [11, 0, 8, 1]
    want = counting(10, 2)
    np.subtract.at(want, [8, 3, 8, 1], 1.0)
    assert bits(layer.rows()) == bits(want)


@on_meshes(1, 2)
def test_d11_a_lookup_can_be_differentiated_like_any_function(devices):
    rng = np.random.default_rng(8)
    emb = js.EmbeddingCollection(
        [js.FeatureSpec("f", table(), combiner="mean")], mesh=mesh_of(devices)
    )
    rows = rng.normal(size=(10, 2)).astype(np.float32)
    state = state_of(emb, {"t": np.zeros((10, 2))})
    bags = [[3, 3, 8], [], [9], [0, 8]]
    ids = emb.pack({"f": js.Ragged.from_lists(bags)})
    c = rng.normal(size=(4, 2)).astype(np.float32)
    _, at = places(emb, "t")
    slab = np.zeros(state.slabs[0].shape, np.float32)
    slab[at] = rows
    slab = jax.device_put(slab, state.slabs[0].sharding)

    def loss(slab):
        acts, _ = emb.lookup(dataclasses.replace(state, slabs=(slab,)), ids)
        return (acts["f"][:4] ** 2 * c).sum()

    def loss_of(rows):
        total = 0.0
        for bag, coefficients in zip(bags, c.astype(np.float64), strict=True):
            pooled = sum((rows[key] for key in bag), np.zeros(2)) / max(len(bag), 1)
            total += (pooled**2 * coefficients).sum()
        return total

    value, grad = jax.jit(jax.value_and_grad(loss))(slab)
    exact, want = rows.astype(np.float64), np.zeros((10, 2))
    assert float(value) == pytest.approx(loss_of(exact), rel=1e-5)
    for place in np.ndindex(10, 2):
        up, down = exact.copy(), exact.copy()
        up[place] += 1e-3
        down[place] -= 1e-3
        want[place] = (loss_of(up) - loss_of(down)) / 2e-3
    np.testing.assert_allclose(np.asarray(grad)[at], want, rtol=1e-5, atol=1e-6)


def test_d15_every_device_gets_its_share_of_the_samples():
    features = [js.FeatureSpec("f", table()), js.FeatureSpec("bag", table(), combiner="mean")]
    trainer = trainer_on(8, features, {"t": counting(10, 2)})[0]
    bags = js.Ragged.from_lists([[i % 10] * (i % 3) for i in range(32)])
    batch = js.Batch({"f": np.arange(32) % 10, "bag": bags}, np.zeros((32, 1)), np.arange(32) / 32)
    packed = trainer.pack(batch)
    for array in (packed.labels, packed.dense, packed.weights, packed.ids.lengths_by_feature):
        assert [shard.data.shape[0] for shard in shards(array)] == [4] * 8
        assert len({shard.device for shard in shards(array)}) == 8
    labels = [np.asarray(shard.data).tolist() for shard in shards(packed.labels)]
    assert labels == (np.arange(32) / 32).reshape(8, 4).tolist()


def test_d16_initial_rows_do_not_depend_on_the_mesh():
    drawn = {}
    for devices in (1, 2, 4, 8):
        emb = js.EmbeddingCollection([js.FeatureSpec("f", table(rows=1000))], mesh=mesh_of(devices))
        slab, at = places(emb, "t")
        drawn[devices] = np.asarray(emb.init(jax.random.key(3)).slabs[slab])[at]
    assert len({bits(rows) for rows in drawn.values()}) == 1
    assert len(np.unique(drawn[1])) > 1900
