# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of row stores: the same run under any tiers and meshes."""

from __future__ import annotations

import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.testing import assert_trees_equal
from tests.store.checkpoints import SETUPS, contents, load, log, restore, save, stored
from tests.store.stores import Stored, dynamic

KINDS = {
    "all": {"capacity": 100},
    "evicting": {"capacity": 30, "eviction": js.LRU(), "admission": js.CountAdmission(2)},
    "bloom": {"admission": js.BloomAdmission(3, 256), "eviction": js.TTL(steps=9)},
    "chance": {"admission": js.ProbabilityAdmission(0.3), "eviction": js.LFU(), "capacity": 30},
}
CASES = [
    ("all", "device", 1, "ssd", 1),
    ("evicting", "ssd", 4, "device", 1),
    ("evicting", "device", 1, "ram", 4),
    ("bloom", "ssd", 1, "ssd", 1),
    ("chance", "ram", 1, "ssd", 4),
]


@pytest.mark.parametrize(("kind", "source", "from_devices", "target", "devices"), CASES)
def test_a_saved_store_goes_on_as_if_it_had_not_been(
    kind, source, from_devices, target, devices, tmp_path
):
    options, data = KINDS[kind], log(0, 24)
    with stored(None, **options) as whole:
        first, _ = whole.train(data[:13])
        rest, _ = whole.train(data[13:])
        want = contents(whole)
    with stored(SETUPS[source](tmp_path / "a"), from_devices, **options) as trained:
        assert_trees_equal(trained.train(data[:13])[0], first)
        before = contents(trained)
        save(trained, tmp_path / "saved")
        assert_trees_equal(contents(trained), before)
    with stored(SETUPS[target](tmp_path / "b"), devices, seed=9, **options) as other:
        restore(tmp_path / "saved", other, trained.steps)
        assert_trees_equal(contents(other), before)
        assert_trees_equal(other.train(data[13:])[0], rest)
        assert_trees_equal(contents(other), want)


def plain_or_tiered(tiers, devices=1, seed=0, keys=None):
    """A table of 50 rows, and one of Dynamic keys beside it, so that there is a store."""
    table = js.TableSpec(
        "id",
        vocabulary_size=50,
        embedding_dim=2,
        optimizer=js.Adagrad(0.1),
        placement="sharded",
        keys=js.Identity() if keys is None else keys,
        tiers=tiers,
    )
    features = [js.FeatureSpec("i", table), js.FeatureSpec("f", dynamic("t", 40, 2))]
    return Stored(features, devices, seed)


def rows_of(trained):
    ids = np.arange(50)
    if "id" in trained.emb.stored_tables:
        return trained.read(ids, "id"), trained.slots(ids, "id")
    state = trained.state
    return trained.emb.read(state, "id", ids), trained.emb.read_slots(state, "id", ids)


@pytest.mark.parametrize("keys", [None, js.Hashed()], ids=["identity", "hashed"])
@pytest.mark.parametrize(
    ("source", "from_devices", "target", "devices"),
    [("device", 4, "ssd", 1), ("ssd", 1, "device", 4)],
)
def test_tables_with_and_without_tiers_are_saved_for_each_other(
    keys, source, from_devices, target, devices, tmp_path
):
    rng = np.random.default_rng(1)
    # Few ids of those there are: the others stay as they were drawn.
    data = [{"i": rng.integers(0, 12, 8), "f": rng.integers(0, 9, 8)} for _ in range(8)]
    with plain_or_tiered(SETUPS[source](tmp_path / "a"), from_devices, keys=keys) as trained:
        trained.train(data)
        before = rows_of(trained)
        save(trained, tmp_path / "saved")
        want = trained.train(data)[0], rows_of(trained)
    with plain_or_tiered(SETUPS[target](tmp_path / "b"), devices, seed=9, keys=keys) as other:
        restore(tmp_path / "saved", other, 8)
        assert_trees_equal(rows_of(other), before)
        got = other.train(data)[0], rows_of(other)
    assert_trees_equal(got, want)


def test_what_a_checkpoint_lacks_starts_as_new(tmp_path):
    old, new = dynamic("t", 40, 2), dynamic("more", 40, 2, tiers=js.Tiers(device_rows=8))
    one = [js.FeatureSpec("f", old)]
    with Stored(one) as trained:
        trained.train([{"f": np.arange(6)}])
        save(trained, tmp_path / "saved")
        want = trained.read(range(6))
    with Stored([*one, js.FeatureSpec("g", new)], seed=9) as both:
        with pytest.raises(js.CheckpointError, match=r"tables/more: not in the checkpoint"):
            load(tmp_path / "saved", both)
        found = load(tmp_path / "saved", both, allow_new=True)
        assert set(found) == {"tables/more", "features/g"}
        assert both.keys("more") == []
        assert both.read(range(6)).tobytes() == want.tobytes()
        both.train([{"f": np.arange(8), "g": np.arange(8)}])
        assert both.keys("more") == list(range(8))


def test_a_table_without_a_key(tmp_path):
    data, options = log(2, 3), {"admission": js.CountAdmission(2)}
    with stored(None, **options) as trained:
        save(trained, tmp_path / "saved")
        trained.train(data)
        want = contents(trained)
    with stored(SETUPS["ram"](None), seed=3, **options) as other:
        other.train(log(3, 2))
        restore(tmp_path / "saved", other)
        assert other.keys() == []
        other.train(data)
        assert_trees_equal(contents(other), want)


def test_small_rows_go_as_they_would_have(tmp_path):
    options = {"eviction": js.L2Norm(below=0.12), "capacity": 44}
    # A log in which other places on the devices would let other rows go.
    data, tiers = log(7, 40, num_keys=44), SETUPS["ram"](None)
    with stored(tiers, **options) as trained:
        trained.train(data[:20])
        save(trained, tmp_path / "saved")
        trained.train(data[20:])
        want, evictions = contents(trained), trained.store.stats()["t"]["evictions"]
    with stored(tiers, seed=9, **options) as other:
        restore(tmp_path / "saved", other, 20)
        other.train(data[20:])
        assert_trees_equal(contents(other), want)
        assert 0 < other.store.stats()["t"]["evictions"] < evictions


def test_rows_expire_by_the_time_of_the_data_from_before_the_save(tmp_path):
    def batch(key, time):
        return js.Batch({n: np.array([key]) for n in "fg"}, np.array([[time]]), np.zeros(1))

    def train(one, *batches):
        one.train(batches, time=lambda batch: batch.dense[0, 0])

    options = {"eviction": js.TTL(seconds=10.0)}
    with stored(SETUPS["ram"](None), **options) as trained:
        train(trained, batch(1, 0.0), batch(2, 5.0))
        save(trained, tmp_path / "saved")
        train(trained, batch(1, 11.0), batch(2, 12.0))
        want = contents(trained)
        assert trained.store.stats()["t"]["evictions"] == 1
    with stored(None, seed=9, **options) as other:
        restore(tmp_path / "saved", other, 2)
        train(other, batch(1, 11.0), batch(2, 12.0))
        assert_trees_equal(contents(other), want)
        assert other.store.stats()["t"]["evictions"] == 1
