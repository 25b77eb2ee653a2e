# SPDX-License-Identifier: Apache-2.0
"""Field cases C: repeated rows, optimizers, precision, decay, NaN.

The rules themselves are tested in ``tests/optimizers``; here each case goes through the whole
update of a collection, on one device and on four. Decided here: Adam is lazy and corrects by the
global step unless a count per row is asked for; decay touches rows of the batch only.
"""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.planner import plan
from jaxsparse.testing import assert_trees_equal
from tests.field_cases.layers import (
    Layer,
    bits,
    counting,
    on_1_and_4,
    table,
    table_rows,
    trainer_on,
)
from tests.store.stores import Stored, dynamic


def one_row(optimizer, *, w, g, devices, steps=(0,), dim=1, rows=4, **fields):
    """Moves row 2 of a table by ``g`` at each of ``steps``; returns the layer."""
    spec = table(dim=dim, rows=rows, optimizer=optimizer, **fields)
    layer = Layer([js.FeatureSpec("f", spec)], {"t": np.full((rows, dim), w)}, devices)
    for step in steps:
        layer.step({"f": np.array([2])}, {"f": np.float32([g])}, step=step)
    return layer


@on_1_and_4
def test_c02_gradients_of_a_row_are_summed_before_they_are_squared(devices):
    shared = table(dim=1, optimizer=js.Adagrad(0.5, initial_accumulator=0.1))
    features = [js.FeatureSpec("f1", shared), js.FeatureSpec("f2", shared)]
    layer = Layer(features, {"t": counting(10)}, devices)
    layer.step(
        {"f1": np.array([7, 1]), "f2": np.array([2, 7])},
        {"f1": np.float32([[0.5], [0]]), "f2": np.float32([[0], [-0.3]])},
    )
    assert layer.slots()["accumulator"][7, 0] == pytest.approx(0.14, rel=1e-6)
    assert layer.rows()[7, 0] == pytest.approx(7 - 0.5 * 0.2 / math.sqrt(0.14), rel=1e-6)


@on_1_and_4
def test_c02_the_same_row_on_every_device_is_moved_once(devices):
    spec = table(dim=1, optimizer=js.Adagrad(0.5, initial_accumulator=0.1))
    layer = Layer([js.FeatureSpec("f", spec)], {"t": counting(10)}, devices)
    layer.step({"f": np.full(4, 7)}, {"f": np.float32([[0.5], [-0.3], [0.25], [-0.05]])})
    assert layer.slots()["accumulator"][7, 0] == pytest.approx(0.1 + 0.4**2, rel=1e-6)
    assert layer.rows()[7, 0] == pytest.approx(7 - 0.5 * 0.4 / math.sqrt(0.26), rel=1e-6)


@pytest.mark.parametrize("tier", ["device", "ram", "ssd"])
def test_c03_slots_of_tables_of_other_widths_under_any_tier(tier, tmp_path):
    tiers = {
        "device": None,
        "ram": js.Tiers(device_rows=2),
        "ssd": js.Tiers(device_rows=2, host_rows=0, ssd=[tmp_path]),
    }[tier]
    rule = js.Adam(0.1, b1=0.9, b2=0.999)
    features = [
        js.FeatureSpec(name, dynamic(name, 10, dim, rule, tiers))
        for name, dim in (("narrow", 4), ("wide", 8))
    ]
    with Stored(features) as trained:
        for start in (0, 2):  # the second pass takes the first one's places
            trained.train([dict.fromkeys(("narrow", "wide"), np.arange(start, start + 2))])
        for name, dim in (("narrow", 4), ("wide", 8)):
            slots = trained.slots(range(4), name)
            np.testing.assert_allclose(slots["m"], np.full((4, dim), 0.1), rtol=1e-6)
            np.testing.assert_allclose(slots["v"], np.full((4, dim), 0.001), rtol=1e-4)


@on_1_and_4
def test_c26_a_row_that_takes_the_place_of_an_evicted_one_is_as_new(devices):
    rule = js.RowwiseAdagrad(0.5, initial_accumulator=0.25)
    spec = dynamic("t", 2, 2, rule, eviction=js.LRU(), initializer=js.uniform(1.0))
    features = [js.FeatureSpec("f", spec), js.FeatureSpec("g", spec)]
    with Stored(features, devices) as trained:
        new = trained.read([3])
        trained.train([{"f": np.array([1, 2]), "g": np.array([2, 1])}])
        acts, _ = trained.train([{"f": np.array([3]), "g": np.array([2])}])
        assert trained.keys() == [2, 3]
        assert bits(acts[0]["f"]) == bits(new)
        assert trained.slots([3])["accumulator"].tolist() == [1.25]
        want = new - 0.5 / math.sqrt(1.25)
        np.testing.assert_allclose(trained.read([3]), want, rtol=1e-6)
        # The evicted key reads as new as well.
        (acts,) = trained.evaluate([{"f": np.array([1]), "g": np.array([3])}])
        assert bits(acts["f"]) == bits(trained.read([1]))
        assert trained.slots([1])["accumulator"].tolist() == [0.25]


@on_1_and_4
@pytest.mark.parametrize("per_row_count", [False, True], ids=["global", "own-count"])
def test_c04_a_row_first_seen_late(devices, per_row_count):
    rule = js.Adam(0.1, eps=0.0, per_row_count=per_row_count)
    layer = one_row(rule, w=0.0, g=[1.0], devices=devices, steps=(999,))
    corrected = (0.1 / (1 - 0.9**1000)) / math.sqrt(0.001 / (1 - 0.999**1000))
    move = 0.1 if per_row_count else 0.1 * corrected
    assert layer.rows()[2, 0] == pytest.approx(-move, rel=1e-6)
    assert not layer.rows()[[0, 1, 3]].any()


@on_1_and_4
def test_c05_rows_absent_from_a_batch_keep_weights_and_moments(devices):
    spec = table(dim=1, rows=5, optimizer=js.Adam(0.1))
    layer = Layer([js.FeatureSpec("f", spec)], {"t": counting(5)}, devices)
    layer.step({"f": np.array([3])}, step=0)
    rows, slots = layer.rows()[3], {name: slot[3] for name, slot in layer.slots().items()}
    assert rows[0] == pytest.approx(3 - 0.1, rel=1e-6)
    for step in range(1, 6):
        layer.step({"f": np.array([1])}, step=step)
    assert bits(layer.rows()[3]) == bits(rows)
    assert {name: bits(slot[3]) for name, slot in layer.slots().items()} == {
        name: bits(slot) for name, slot in slots.items()
    }
    assert layer.rows()[1, 0] != 1


@on_1_and_4
@pytest.mark.parametrize("step", [0, 7])
def test_c06_bias_correction_continues_from_the_given_step(devices, step):
    layer = one_row(js.Adam(0.1, eps=0.0), w=0.0, g=[1.0], devices=devices, steps=(step,))
    t = step + 1
    move = 0.1 * (0.1 / (1 - 0.9**t)) / math.sqrt(0.001 / (1 - 0.999**t))
    assert layer.rows()[2, 0] == pytest.approx(-move, rel=1e-6)
    if step == 0:
        assert move == pytest.approx(0.1)


@on_1_and_4
@pytest.mark.parametrize(
    ("decay", "want"),
    [({"l2": 0.1}, (0.9, 0.06, 0.00036)), ({"weight_decay": 0.1}, (0.89, 0.05, 0.00025))],
    ids=["l2", "decoupled"],
)
def test_c07_l2_is_not_decoupled_decay(devices, decay, want):
    layer = one_row(js.Adam(0.1, eps=0.0, **decay), w=1.0, g=[0.5], devices=devices)
    slots = layer.slots()
    got = (layer.rows()[2, 0], slots["m"][2, 0], slots["v"][2, 0])
    assert got == pytest.approx(want, rel=1e-6)
    assert layer.rows()[[0, 1, 3], 0].tolist() == [1.0] * 3


@on_1_and_4
def test_c08_missed_decay_is_counted_from_the_last_time_before(devices):
    rule = js.SGD(0.1, weight_decay=0.01, catch_up_decay=True)
    layer = one_row(rule, w=1.0, g=[0.0], devices=devices, steps=(3,))
    assert layer.rows()[2, 0] == pytest.approx(0.999, rel=1e-6)
    before = float(layer.rows()[2, 0])
    layer.step({"f": np.array([2])}, {"f": 0.0}, step=8)
    assert layer.rows()[2, 0] / before == pytest.approx((1 - 0.1 * 0.01) ** 5, rel=1e-6)
    assert layer.rows()[2, 0] / before == pytest.approx(0.99501, abs=5e-6)
    assert layer.slots()["last_step"].tolist() == [-1, -1, 8, -1]


@on_1_and_4
def test_c09_decay_leaves_the_rows_of_other_batches_alone(devices):
    spec = table(dim=1, rows=1000, optimizer=js.SGD(0.1, l2=0.01))
    rows = np.random.default_rng(1).normal(size=(1000, 1)).astype(np.float32)
    layer = Layer([js.FeatureSpec("f", spec)], {"t": rows}, devices)
    layer.step({"f": np.array([17, 912])}, {"f": 0.0})
    changed = [r for r in range(1000) if bits(layer.rows()[r]) != bits(rows[r])]
    assert changed == [17, 912]
    np.testing.assert_allclose(layer.rows()[changed], rows[changed] * (1 - 0.001), rtol=1e-6)


@on_1_and_4
def test_c10_adagrad_of_a_table_is_adagrad_of_a_dense_parameter(devices):
    rule = js.Adagrad(0.1, initial_accumulator=0.0, eps=1e-10)
    layer = one_row(rule, w=1.0, g=[1e-7], devices=devices, steps=(0, 1, 2))
    dense, accumulator = 1.0, 0.0
    for _ in range(3):
        accumulator += 1e-14
        dense -= 0.1 * 1e-7 / (math.sqrt(accumulator) + 1e-10)
    assert layer.rows()[2, 0] == pytest.approx(dense, rel=3e-7)
    assert "initial_accumulator=0.0, eps=1e-10" in repr(layer.emb.tables["t"].optimizer)


@on_1_and_4
def test_c11_a_gradient_of_zero_with_an_empty_accumulator_moves_nothing(devices):
    rule = js.Adagrad(0.25, initial_accumulator=0.0, eps=0.0)
    layer = one_row(rule, w=1.0, g=[0.0, 1.0], dim=2, devices=devices)
    assert layer.rows().tolist() == [[1, 1], [1, 1], [1, 0.75], [1, 1]]


@on_1_and_4
def test_c12_ftrl_accumulates_the_gradient_and_nothing_else(devices):
    layer = one_row(js.Ftrl(3.0), w=1.0, g=[0.1], devices=devices)
    slots = layer.slots()
    assert slots["n"][2, 0] == pytest.approx(0.01, rel=1e-6)
    z = 0.1 - 0.1 / 3.0
    assert slots["z"][2, 0] == pytest.approx(z, rel=1e-6)
    assert layer.rows()[2, 0] == pytest.approx(-z * 3.0 / 1.1, rel=1e-6)


@on_1_and_4
def test_c14_a_hundred_thousand_gradients_of_one_row(devices):
    layer = Layer([js.FeatureSpec("f", table(dim=1))], {"t": np.zeros((10, 1))}, devices)
    layer.step({"f": np.full(100_000, 7)}, {"f": np.float32(0.1)})
    want = 100_000 * float(np.float32(0.1))
    assert want == pytest.approx(10000.000149, abs=1e-6)
    assert layer.rows()[7, 0] == pytest.approx(-want, rel=1e-6)


@on_1_and_4
def test_c14_ones_are_not_lost_on_top_of_two_to_the_24(devices):
    rows = np.full((10, 1), 2.0**24)
    layer = Layer([js.FeatureSpec("f", table(dim=1))], {"t": rows}, devices)
    layer.step({"f": np.full(1000, 7)}, {"f": np.float32(-1)})
    assert layer.rows()[7, 0] == 16778216


@on_1_and_4
def test_c15_every_row_is_written_at_most_once(devices):
    shared = table(dim=1)
    features = [js.FeatureSpec("one", shared), js.FeatureSpec("bag", shared)]
    layer = Layer(features, {"t": counting(10)}, devices)
    rng = np.random.default_rng(2)
    bags = [rng.integers(0, 10, 5).tolist() for _ in range(8)]
    one = rng.integers(0, 10, 8)
    ids = layer.emb.pack({"one": one, "bag": js.Ragged.from_lists(bags)})
    acts, residuals = layer.emb.lookup(layer.state, ids)
    found = layer.emb.row_grads(residuals, jax.tree.map(np.ones_like, acts))
    touched = 0
    for block in np.asarray(found.rows[0]).reshape(devices, -1):
        written = block[block != found.num_rows[0]].tolist()
        assert len(written) == len(set(written))
        touched += len(written)
    assert touched == len({*one.tolist(), *(key for bag in bags for key in bag)})
    with pytest.raises(ValueError, match="write 't': 2 keys address one row, the first is 4"):
        layer.emb.write(layer.state, "t", [4, 5, 4], np.zeros((3, 1)))


@on_1_and_4
def test_c16_row_and_state_are_written_together(devices):
    # Powers of two and an empty accumulator: g / sqrt(g^2) is exactly 1, all bits are known.
    spec = table(rows=500, optimizer=js.Adagrad(0.25, initial_accumulator=0.0, eps=0.0))
    rng = np.random.default_rng(3)
    rows = rng.integers(-64, 65, (500, 2)).astype(np.float32)
    layer = Layer([js.FeatureSpec("f", spec)], {"t": rows}, devices)
    keys = rng.choice(500, 96, replace=False)
    grads = (2.0 ** rng.integers(-3, 4, (96, 2)) * rng.choice([-1, 1], (96, 2))).astype(np.float32)
    layer.step({"f": keys}, {"f": grads})
    want, accumulator = rows.copy(), np.zeros_like(rows)
    for key, grad in zip(keys, grads, strict=True):
        want[key] -= 0.25 * np.sign(grad)
        accumulator[key] = grad**2
    assert bits(layer.rows()) == bits(want)
    assert bits(layer.slots()["accumulator"]) == bits(accumulator)


@on_1_and_4
def test_c19_state_of_a_half_precision_table_is_float32(devices):
    rule = js.Adagrad(0.01, initial_accumulator=1.0)
    spec = table(dim=1, rows=4, optimizer=rule, dtype="bfloat16")
    layer = Layer([js.FeatureSpec("f", spec)], {"t": np.zeros((4, 1))}, devices)
    emb, ids = layer.emb, layer.emb.pack({"f": np.array([2])})
    grads = {"f": np.zeros((ids.padded_samples, 1), np.float32)}
    grads["f"][0] = 0.01

    @jax.jit
    def train(state):
        def step(t, state):
            _, residuals = emb.lookup(state, ids)
            return emb.update(state, residuals, grads, step=t)

        return jax.lax.fori_loop(0, 1000, step, state)

    layer.state = train(layer.state)
    assert layer.rows().dtype == spec.dtype
    assert layer.slots()["accumulator"].dtype == np.float32
    assert layer.slots()["accumulator"][2, 0] == pytest.approx(1.1, rel=2e-5)


@on_1_and_4
def test_c20_planned_bytes_are_the_bytes_that_are_there(devices):
    spec = table(rows=1000, dim=16, dtype="bfloat16", optimizer=js.Adam(0.1))
    layer = Layer([js.FeatureSpec("f", spec)], {"t": np.zeros((1000, 16))}, devices)
    arrays = [*layer.state.slabs, *layer.state.slots[0].values()]
    real = sum(array.nbytes for array in arrays)
    assert real == 1000 * 16 * (2 + 4 + 4)
    planned = plan([spec], devices).bytes_per_device
    for device, planned_bytes in zip(layer.emb.mesh.devices.flat, planned, strict=True):
        shards = [shard for array in arrays for shard in array.addressable_shards]
        held = sum(shard.data.nbytes for shard in shards if shard.device == device)
        assert held == planned_bytes == real // devices


# ---- C21: one bad record ----------------------------------------------------------------------

FEATURES = [js.FeatureSpec("f", table(optimizer=js.Adam(0.1)))]
BAD = {
    "label": ("labels", (3,), np.nan, "labels is nan in sample 3"),
    "dense": ("dense", (3, 0), np.inf, "dense is inf in sample 3, column 0"),
    "weight": ("weights", (3,), np.nan, "weights is nan in sample 3"),
}


def records(seed, bad=None):
    rng = np.random.default_rng(seed)
    columns = {
        "labels": rng.integers(0, 2, 8).astype(np.float32),
        "dense": rng.normal(size=(8, 1)).astype(np.float32),
        "weights": rng.uniform(0.5, 1.5, 8).astype(np.float32),
    }
    if bad is not None:
        name, at, value, _ = BAD[bad]
        columns[name][at] = value
    return js.Batch({"f": rng.integers(0, 10, 8)}, **columns)


def run(devices, batches, policy):
    trainer, state = trainer_on(devices, FEATURES, {"t": counting(10, 2)}, on_bad_sample=policy)
    outcomes = []
    for batch in batches:
        state, outcome = trainer.step(state, batch)
        outcomes.append(outcome)
    return trainer, state, outcomes


@on_1_and_4
@pytest.mark.parametrize("bad", BAD)
def test_c21_a_bad_record_is_an_error_before_anything_changes(devices, bad):
    trainer, state, _ = run(devices, [records(0)], "error")
    before = jax.tree.map(np.array, state.embeddings)
    with pytest.raises(ValueError, match=rf"{BAD[bad][3]} \(1 of 8 samples are bad\)"):
        trainer.step(state, records(1, bad))
    assert_trees_equal(jax.tree.map(np.array, state.embeddings), before)
    assert int(state.step) == 1


@on_1_and_4
def test_c21_a_skipped_batch_leaves_no_trace(devices):
    batches = [records(0), *(records(1, bad) for bad in BAD), records(2)]
    trainer, skipped, outcomes = run(devices, batches, "skip")
    assert [outcome.get("skipped", False) for outcome in outcomes] == [0, 1, 1, 1, 0]
    _, without, _ = run(devices, [records(0), records(2)], "skip")
    assert_trees_equal(skipped, without)
    history = trainer.fit(batches, epochs=1, log_every=99, progress=False).history
    assert [(row["step"], row["skipped_batches"]) for row in history] == [(2, 3)]


@on_1_and_4
@pytest.mark.parametrize("bad", BAD)
def test_c21_a_dropped_record_leaves_the_batch_of_the_others(devices, bad):
    _, dropped, (outcome,) = run(devices, [records(1, bad)], "drop")
    good = records(1).take([0, 1, 2, 4, 5, 6, 7])
    trainer, without, (plain,) = run(devices, [good], "drop")
    assert_trees_equal(dropped, without)
    assert float(outcome["loss"]) == float(plain["loss"])
    logits = 0.25 + 2.0 * good.features["f"] + good.dense[:, 0].astype(np.float64)
    losses = np.log1p(np.exp(np.where(good.labels == 1, -logits, logits)))
    want = np.sum(good.weights * losses) / np.sum(good.weights.astype(np.float64))
    assert float(plain["loss"]) == pytest.approx(want, rel=1e-6)
    assert np.isfinite(table_rows(trainer, without)).all()


@on_1_and_4
def test_c21_a_step_that_is_not_finite_changes_no_bit(devices):
    # The input is fine; the tables are not. No array may be half updated.
    rows = counting(10, 2)
    rows[4] = np.inf
    trainer, state = trainer_on(devices, FEATURES, {"t": rows}, on_bad_sample="skip")
    before = jax.tree.map(np.array, (state.step, state.params, state.embeddings))
    batch = js.Batch({"f": np.arange(8)}, records(0).dense, np.zeros(8))
    state, outcome = trainer.step(state, batch)
    assert not bool(outcome["finite"])
    assert_trees_equal(jax.tree.map(np.array, (state.step, state.params, state.embeddings)), before)


@on_1_and_4
@pytest.mark.parametrize("rule", [js.SGD(0.5), js.Adam(0.1)], ids=["sgd", "adam"])
def test_c21_a_disabled_update_changes_no_bit(devices, rule):
    layer = Layer([js.FeatureSpec("f", table(optimizer=rule))], {"t": counting(10, 2)}, devices)
    before = jax.tree.map(np.array, layer.state)
    layer.step({"f": np.array([3, 4])}, {"f": np.nan}, enabled=False)
    assert_trees_equal(jax.tree.map(np.array, layer.state), before)
