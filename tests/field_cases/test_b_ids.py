# SPDX-License-Identifier: Apache-2.0
"""Field cases B: sign, range and width of ids, hashing, ids never seen, strings.

Decided here: -1 is padding only where a feature says ``padding_id=-1``, any other negative id is
an error that names the feature; an id that training never met evaluates with its initial row.
"""

from __future__ import annotations

import jax
import numpy as np
import pyarrow as pa
import pytest

import jaxsparse as js
from jaxsparse.packing import distinct
from jaxsparse.ragged import row_splits_from_lengths
from jaxsparse.testing import assert_trees_equal
from tests.field_cases.layers import (
    Layer,
    bits,
    counting,
    mesh_of,
    on_1_and_4,
    table,
    trainer_on,
)
from tests.store.stores import Stored, dynamic

DTYPES = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


@pytest.mark.parametrize("devices", [4, 8], ids=lambda n: f"mesh{n}")
def test_b02_unsigned_32_bit_ids_of_a_table_that_has_them(devices):
    # Packing allocates no table, so ids beyond 2^31 and the offset behind another are real.
    small, large = table("small", 1000), table("large", 2**32 + 7)
    features = [js.FeatureSpec("a", small), js.FeatureSpec("b", large)]
    emb = js.EmbeddingCollection(features, mesh=mesh_of(devices))
    ids = [2**32 - 1, 2**31, 2**31 - 1, 0, 2**32 - 2]
    narrow, wide = (
        emb.pack({"a": np.arange(5).astype(dtype), "b": np.array(ids, dtype)})
        for dtype in (np.uint32, np.int64)
    )
    assert_trees_equal(narrow, wide)
    num_rows, rows_of_small = emb.layout.slabs[0].rows_per_shard, 1000 // devices
    asked = np.asarray(narrow.slabs[0].rows)
    assert np.sum((asked >= rows_of_small) & (asked < num_rows)) == 5
    assert np.sum(asked < rows_of_small) == 5


@on_1_and_4
def test_b02_unsigned_32_bit_keys_of_a_hashed_table(devices):
    layer = Layer(
        [js.FeatureSpec("f", table(rows=5000, dim=1, keys=js.Hashed()))],
        {"t": counting(5000)},
        devices,
    )
    keys = [2**32 - 1, 2**31, 7, 0]
    unsigned, _ = layer.step({"f": np.array(keys, np.uint32)}, {"f": 0.0})
    signed, _ = layer.step({"f": np.array(keys, np.int64)}, {"f": 0.0})
    wrapped, _ = layer.step({"f": np.array(keys, np.uint32).astype(np.int32)}, {"f": 0.0})
    assert bits(unsigned["f"]) == bits(signed["f"])
    assert (unsigned["f"] != wrapped["f"])[:, 0].tolist() == [True, True, False, False]


@on_1_and_4
def test_b03_minus_one_is_padding_where_a_feature_says_so(devices):
    padded = js.FeatureSpec("f", table(), combiner="mean", padding_id=-1)
    layer = Layer([padded], {"t": counting(10, 2)}, devices)
    acts, _ = layer.step({"f": js.Ragged.from_lengths([-1, 6], [2])})
    assert acts["f"].tolist() == [[6, 6]]
    want = counting(10, 2)
    want[6] -= 1
    assert bits(layer.rows()) == bits(want)


@on_1_and_4
def test_b03_other_negative_ids_are_named_errors(devices):
    features = {
        "padded": js.FeatureSpec("padded", table(), padding_id=-1),
        "plain": js.FeatureSpec("plain", table()),
    }
    for name, bad in (("padded", -2), ("plain", -1), ("plain", -(2**63))):
        emb = js.EmbeddingCollection([features[name]], mesh=mesh_of(devices))
        with pytest.raises(ValueError, match=rf"feature '{name}': key {bad} .*outside 0..9"):
            emb.pack({name: np.array([[0, 1], [bad, 2]])})


@on_1_and_4
def test_b04_what_is_outside_has_no_value_and_gets_no_gradient(devices):
    lenient = table(rows=4, dim=1, keys=js.Identity(out_of_range="ignore"))
    layer = Layer([js.FeatureSpec("f", lenient)], {"t": counting(4)}, devices)
    batch = {"f": js.Ragged.from_lists([[4, 7], [2, 2**40]])}
    assert layer.emb.pack(batch).ignored == {"f": 3}
    acts, _ = layer.step(batch)
    assert acts["f"].tolist() == [[0.0], [2.0]]
    # A clamped gather would have sent the first bag's gradient into row 3.
    assert layer.rows()[:, 0].tolist() == [0, 1, 1, 3]


@on_1_and_4
def test_b04_samples_behind_the_last_one_pull_on_no_row(devices):
    # Padded samples are bags behind the last: whatever gradient they carry reaches nothing.
    emb = js.EmbeddingCollection([js.FeatureSpec("f", table(dim=1))], mesh=mesh_of(devices))
    state = Layer(emb.features, {"t": counting(10)}, devices).state
    ids = emb.pack({"f": js.Ragged.from_lists([[2], [9, 2], []])})
    _, residuals = emb.lookup(state, ids)
    grads = np.full((ids.padded_samples, 1), np.nan, np.float32)
    grads[:2] = [[0.5], [0.25]]
    sums = emb.row_grads(residuals, {"f": grads})
    found = np.asarray(sums.rows[0]) != sums.num_rows[0]
    assert sorted(np.asarray(sums.grads[0])[found, 0].tolist()) == [0.25, 0.75]


@pytest.mark.parametrize("dim", [1, 3, 12])
@pytest.mark.parametrize("tier", ["device", "ram", "ssd"])
def test_b06_padding_looks_nothing_up_under_any_tier(dim, tier, tmp_path):
    tiers = {
        "device": None,
        "ram": js.Tiers(device_rows=5),
        "ssd": js.Tiers(device_rows=5, host_rows=1, ssd=[tmp_path]),
    }[tier]
    spec = dynamic("t", 50, dim, tiers=tiers)
    features = [
        js.FeatureSpec("sum", spec, padding_id=-1),
        js.FeatureSpec("all", spec, combiner=None, max_length=2, padding_id=-1),
    ]
    with Stored(features) as trained:
        rows = trained.read(np.arange(20))
        for start in (0, 8, 0):
            keys = np.array([[start, -1], [-1, -1], [start + 1, start + 2]])
            acts, _ = trained.train([{"sum": keys, "all": keys}])
            zero = np.zeros(dim, np.float32)
            a, b, c = rows[start : start + 3]
            assert bits(acts[0]["sum"]) == bits(np.stack([a, zero, b + c]))
            assert bits(acts[0]["all"]) == bits(np.stack([[a, zero], [zero, zero], [b, c]]))
            rows[start : start + 3] -= 2
        assert trained.keys() == [0, 1, 2, 8, 9, 10]
        assert bits(trained.read(np.arange(20))) == bits(rows)


TOP_KEYS = [2**64 - 1, 2**64 - 2, 2**64 - 3, 2**63, 2**63 - 1, 0]


@on_1_and_4
def test_b07_no_key_is_reserved(devices, tmp_path):
    tiers = js.Tiers(device_rows=2, host_rows=1, ssd=[tmp_path])
    spec = dynamic(tiers=tiers, initializer=js.constant(0.0))
    with Stored([js.FeatureSpec("f", spec)], devices) as trained:
        for number, key in enumerate([*TOP_KEYS, 2**63]):
            trained.train([{"f": np.array([key], np.uint64)}], [{"f": -1.0 - number}])
        trained.train([{"f": np.array([-1], np.int64)}], [{"f": -100.0}])
        assert trained.keys() == sorted(TOP_KEYS)
        got = trained.read(np.array(TOP_KEYS, np.uint64))[:, 0].tolist()
        assert got == [101.0, 2.0, 3.0, 4.0 + 7.0, 5.0, 6.0]
        assert trained.store.stats()["t"]["lookups"] == 8


def test_b08_the_largest_signed_key_is_told_with_its_row():
    with Stored([js.FeatureSpec("f", dynamic(initializer=js.constant(0.0)))]) as trained:
        trained.train([{"f": np.array([2**63 - 1, 5])}])
        keys = trained.store.keys("t")
        assert keys.tolist() == [5, 2**63 - 1]
        assert trained.read(keys).tolist() == [[-1, -1], [-1, -1]]


@pytest.mark.parametrize("num_owners", [1, 4])
def test_b09_offsets_of_an_exchange_are_64_bit(num_owners):
    rows = 2**31 - 2
    codes = [num_owners * rows - 1, 0, rows - 1, num_owners * rows - 1, -1]
    found = distinct(np.array(codes, np.int64), num_owners, rows)
    wanted = sorted({code for code in codes if code >= 0})
    bounds = [sum(code < owner * rows for code in wanted) for owner in range(num_owners + 1)]
    assert found.bounds.dtype == found.codes.dtype == np.int64
    assert (found.codes.tolist(), found.bounds.tolist()) == (wanted, bounds)


@on_1_and_4
def test_b09_devices_with_very_unequal_shares(devices):
    layer = Layer([js.FeatureSpec("f", table(dim=1))], {"t": counting(10)}, devices)
    bags = [[9, 8, 7, 1, 9, 9, 5], [], [3], [], [2, 2], [], [], [4] * 40]
    acts, _ = layer.step({"f": js.Ragged.from_lists(bags)})
    assert acts["f"][:, 0].tolist() == [float(sum(bag)) for bag in bags]
    counts = np.bincount(np.concatenate([np.array(bag, int) for bag in bags]), minlength=10)
    assert layer.rows()[:, 0].tolist() == (np.arange(10) - counts).tolist()


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_b10_offsets_of_all_features_are_64_bit(dtype):
    splits = row_splits_from_lengths(np.full(3, 2**30, dtype))
    assert splits.dtype == np.int64
    assert splits.tolist() == [0, 2**30, 2**31, 3 * 2**30]


@on_1_and_4
def test_b12_every_integer_dtype_finds_the_same_rows(devices):
    tables = {"small": table("small", 300, 1), "large": table("large", 70_000, 1)}
    features = [js.FeatureSpec(name, spec) for name, spec in tables.items()]
    rows = {name: counting(spec.vocabulary_size) for name, spec in tables.items()}
    layer = Layer(features, rows, devices)
    for dtype in DTYPES:
        limit = min(np.iinfo(dtype).max, 30_000)
        ids = {name: np.arange(256) % 100 for name in tables}
        ids["small"][-3:], ids["large"][-3:] = min(200, limit), limit
        acts, _ = layer.step({name: values.astype(dtype) for name, values in ids.items()})
        for name, values in ids.items():
            wanted = rows[name][values]
            np.testing.assert_array_equal(acts[name], wanted, err_msg=f"{name} {dtype}")
            np.subtract.at(rows[name], values, 1.0)
            np.testing.assert_array_equal(layer.rows(name), rows[name], err_msg=f"{dtype}")


@on_1_and_4
def test_b14_the_container_of_a_key_does_not_choose_its_row(devices):
    layer = Layer(
        [js.FeatureSpec("f", table(rows=5000, dim=1, keys=js.Hashed()))],
        {"t": counting(5000)},
        devices,
    )

    def rows_of(keys):
        acts, _ = layer.step({"f": keys}, {"f": 0.0})
        return acts["f"][:, 0].tolist()

    integers = [
        np.array([1, 2]),
        np.array([1, 2], np.int32),
        np.array([1, 2], np.uint8),
        np.array([np.int64(1), 2], object),
        js.Ragged.from_lists([[np.int32(1)], [np.uint64(2)]]),
        js.Ragged.from_arrow(pa.array([[1], [2]], pa.list_(pa.int16()))),
        np.array([pa.scalar(1), pa.scalar(2)], object),
    ]
    texts = [
        np.array(["1", "b"]),
        np.array([b"1", b"b"]),
        np.array([np.str_("1"), "b"], object),
        js.Ragged.from_lists([["1"], [b"b"]]),
        js.Ragged.from_arrow(pa.array([["1"], ["b"]])),
    ]
    for group in (integers, texts):
        first, *others = map(rows_of, group)
        assert all(other == first for other in others)
    assert rows_of(integers[0])[0] != rows_of(texts[0])[0]


@on_1_and_4
def test_b14_lists_are_not_cast_before_they_are_looked_at(devices):
    spec = table(rows=5000, dim=1, keys=js.Hashed())
    emb = js.EmbeddingCollection([js.FeatureSpec("f", spec)], mesh=mesh_of(devices))
    assert_trees_equal(
        emb.pack({"f": [[1, 2], [3, 4]]}), emb.pack({"f": np.array([[1, 2], [3, 4]])})
    )
    assert_trees_equal(
        emb.pack({"f": [1, 2**63]}), emb.pack({"f": np.array([1, 2**63], np.uint64)})
    )
    for keys, text in (
        (["a", 1], "'f': keys mix integers and strings: 'a' at position 0 is a string"),
        ([2, True], "'f': keys must be integers, str or bytes, got bool True at position 1"),
        ([1, 2.0], "'f': keys must be integers, str or bytes, got float 2.0 at position 1"),
    ):
        with pytest.raises(TypeError, match=text):
            emb.pack({"f": keys})
    with pytest.raises(ValueError, match=r"feature 'f': nested lists .* use Ragged.from_lists"):
        emb.pack({"f": [[1, 2], [3]]})


@on_1_and_4
def test_b15_ids_never_trained_evaluate_with_their_initial_rows(devices):
    rows = np.random.default_rng(6).normal(size=(10, 2)).astype(np.float32)
    trainer, state = trainer_on(devices, [js.FeatureSpec("f", table())], {"t": rows})
    seen = js.Batch({"f": np.array([0, 1, 2, 3])}, labels=[0, 1, 1, 0])
    state, _ = trainer.step(state, seen)
    bias = float(state.params.bias[...][0])
    unseen = js.Batch({"f": np.array([9, 4, 6, 5])}, labels=[0, 1, 0, 1])
    logits = np.array([rows[i].astype(np.float64).sum() + bias for i in (9, 4, 6, 5)])
    got = trainer.predict(state, [unseen])
    np.testing.assert_allclose(got, 1 / (1 + np.exp(-logits)), rtol=1e-5)
    pairs = [logits[p] > logits[n] for p in (1, 3) for n in (0, 2)]
    metrics = trainer.evaluate(state, [unseen])
    assert metrics["auc"] == pytest.approx(np.mean(pairs))
    assert np.isfinite(metrics["loss"])


@on_1_and_4
def test_b18_strings_for_an_integer_feature_are_refused_at_the_door(devices):
    trainer, state = trainer_on(devices, [js.FeatureSpec("city", table())], {"t": counting(10, 2)})
    for keys in (np.array(["Oslo", "Rome"]), js.Ragged.from_lists([["Oslo"], []])):
        with pytest.raises(TypeError, match=r"feature 'city': .*'Oslo' at position 0"):
            trainer.emb.pack({"city": keys})
        with pytest.raises(TypeError, match=r"feature 'city': .*'Oslo' at position 0"):
            trainer.step(state, js.Batch({"city": keys}, labels=[0, 1]))
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(state))
