# SPDX-License-Identifier: Apache-2.0
"""Admission and eviction: which keys have rows after which batches, against dicts."""

from __future__ import annotations

import collections

import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.store.admission import AdmitByBloomCount, make_admitter
from tests.store.stores import Stored, batch_of, dynamic


def run(batches, **keys):
    """Keys that have rows after each batch; one batch a pass."""
    capacity = keys.pop("capacity", 100)
    result = []
    with Stored([js.FeatureSpec("f", dynamic("t", capacity, **keys))]) as trained:
        for batch in batches:
            trained.train([{"f": np.array(batch)}])
            result.append(set(trained.keys()))
    return result


def test_count_admission_counts_occurrences_of_all_batches():
    rng = np.random.default_rng(0)
    counts, want = collections.Counter(), []
    batches = [rng.integers(0, 60, 10).tolist() for _ in range(8)]
    for batch in batches:
        counts.update(batch)
        want.append({key for key, count in counts.items() if count >= 3})
    assert run(batches, admission=js.CountAdmission(3)) == want
    # Far more counters than keys: as exact counts.
    assert run(batches, admission=js.BloomAdmission(3, bytes=1 << 16)) == want


def test_all_occurrences_of_the_batch_that_admits_a_key_read_its_row():
    keys = {"admission": js.CountAdmission(2), "initializer": js.uniform(1.0)}
    with Stored([js.FeatureSpec("f", dynamic(**keys))]) as trained:
        default, row = trained.read([5])[0], None
        (acts,), _ = trained.train([{"f": np.array([5, 6, 6])}])
        assert acts["f"][0].tolist() == default.tolist()
        row = acts["f"][1]
        assert acts["f"][2].tolist() == row.tolist() != default.tolist()
        # The default row learned from key 5, and row 6 from both its occurrences.
        assert trained.read([5])[0].tolist() == (default - np.float32(1)).tolist()
        assert trained.read([6])[0].tolist() == (row - np.float32(2)).tolist()
        # Key 5 comes again: its row starts as new, not as what it read so far.
        (acts,), _ = trained.train([{"f": np.array([5])}])
        with Stored([js.FeatureSpec("f", dynamic(initializer=js.uniform(1.0)))]) as plain:
            assert acts["f"].tolist() == plain.read([5]).tolist()


@pytest.mark.parametrize("devices", [1, 4])
def test_a_fixed_default_row_never_moves(devices):
    admission = js.CountAdmission(3, default_row="fixed")
    keys = {"admission": admission, "initializer": js.uniform(1.0)}
    table = dynamic("t", 8, 2, js.Adagrad(1.0), js.Tiers(device_rows=4), **keys)
    with Stored([js.FeatureSpec("f", table)], devices) as trained:
        default = trained.read([1])
        trained.train([{"f": np.array([1, 2, 3, 3, 3])}, {"f": np.array([1, 4])}])
        assert trained.read([1, 4]).tolist() == [default[0].tolist()] * 2
        assert trained.slots([1])["accumulator"].tolist() == [[np.float32(0.1)] * 2]
        assert trained.keys() == [3]
        assert (trained.slots([3])["accumulator"] == np.float32(9.1)).all()


def test_probability_admission_is_a_coin_for_every_occurrence():
    keys = np.arange(4000, dtype=np.uint64)
    admitter = make_admitter(js.ProbabilityAdmission(0.25, seed=3))
    for counts, p in ((1, 0.25), (3, 1 - 0.75**3)):
        drawn = [admitter.decide(keys, np.full(4000, counts), step) for step in range(4)]
        assert abs(np.mean(drawn) - p) < 5 * (p * (1 - p) / 16000) ** 0.5
        # Another batch draws anew, the same one the same.
        assert (drawn[0] != drawn[1]).any()
        assert (drawn[0] == admitter.decide(keys, np.full(4000, counts), 0)).all()
    other = make_admitter(js.ProbabilityAdmission(0.25, seed=4))
    assert (other.decide(keys, np.ones(4000), 0) != admitter.decide(keys, np.ones(4000), 0)).any()
    assert make_admitter(js.ProbabilityAdmission(1)).decide(keys, np.ones(4000), 0).all()


def test_a_bloom_filter_never_counts_too_low():
    rng = np.random.default_rng(1)
    admitter = AdmitByBloomCount(200, 1000)
    counts = collections.Counter()
    for _ in range(20):
        keys, seen = np.unique(rng.integers(0, 400, 300).astype(np.uint64), return_counts=True)
        admitter.book(keys, seen, np.zeros(keys.size, bool))
        counts.update(dict(zip(keys.tolist(), seen.tolist(), strict=True)))
    keys = np.arange(400, dtype=np.uint64)
    got, want = admitter.counts(keys), np.array([counts[int(key)] for key in keys])
    assert (got >= want).all() and (got > want).any()
    assert got.mean() < 1.5 * want.mean()
    assert admitter.nbytes == 1000


def test_lru_gives_up_what_has_not_come_for_longest():
    batches = [[1], [2], [3], [4], [1], [5], [3, 6]]
    got = run(batches, capacity=4, eviction=js.LRU())
    assert got[-2:] == [{1, 3, 4, 5}, {1, 3, 5, 6}]


def test_lfu_gives_up_what_came_least_and_of_those_the_oldest():
    batches = [[1, 1, 1], [2], [3], [4, 4], [5], [6]]
    got = run(batches, capacity=4, eviction=js.LFU())
    assert got[-2:] == [{1, 3, 4, 5}, {1, 4, 5, 6}]


def test_ttl_by_steps():
    batches = [[1, 2], [1], [1], [1], [2]]
    with Stored([js.FeatureSpec("f", dynamic(eviction=js.TTL(steps=3)))]) as trained:
        initial = trained.read([1, 2])
        trained.train([{"f": np.array(batch)} for batch in batches])
        # Key 2 was away for four batches: its row was as new when it came again.
        assert trained.read([1, 2]).tolist() == (initial - np.float32([[4], [1]])).tolist()
        assert trained.store.stats()["t"]["evictions"] == 1
        trained.train([{"f": np.array([1, 2])}])
        assert trained.read([1, 2]).tolist() == (initial - np.float32([[5], [2]])).tolist()


def test_ttl_by_the_time_of_the_data():
    def batch(key, time):
        return js.Batch({"f": np.array([key])}, np.array([[time]]), np.zeros(1))

    data = [batch(1, 0.0), batch(2, 5.0), batch(1, 9.0), batch(2, 16.0)]
    table = dynamic(eviction=js.TTL(seconds=10.0))
    with Stored([js.FeatureSpec("f", table)]) as trained:
        initial = trained.read([1, 2])
        with pytest.raises(ValueError, match=r"tables \['t'\] have TTL\(seconds=\): give time="):
            trained.train(data)
        trained.train(data, time=lambda b: b.dense[0, 0])
        assert trained.read([1, 2]).tolist() == (initial - np.float32([[2], [1]])).tolist()


def test_small_norms_go_when_the_table_is_nearly_full():
    table = dynamic("t", 10, 2, eviction=js.L2Norm(below=2.0), initializer=js.constant(0.0))
    with Stored([js.FeatureSpec("f", table)]) as trained:
        # Norms sqrt(2) for one update, 2 sqrt(2) for two.
        trained.train([{"f": np.array([0, 0, 1, 1, *range(2, 8)])}])
        assert trained.keys() == list(range(8))
        trained.train([{"f": np.array([8])}])
        assert trained.keys() == [0, 1, 8]
        trained.train([{"f": np.array([2])}])
        assert trained.keys() == [0, 1, 2, 8]
        assert trained.read([2, 3]).tolist() == [[-1, -1], [0, 0]]
        assert trained.store.stats()["t"]["evictions"] == 6


def test_small_rows_of_the_pass_to_come_and_those_that_leave_for_it_stay():
    options = {"eviction": js.L2Norm(below=2.0), "initializer": js.constant(0.0)}
    for tiers, num_leaving in ((None, 0), (js.Tiers(device_rows=4), 2)):
        with Stored([js.FeatureSpec("f", dynamic("t", 10, 2, tiers=tiers, **options))]) as trained:
            trained.train([{"f": np.arange(4)}, {"f": np.arange(4, 8)}], batches_per_pass=1)
            assert trained.keys() == list(range(8))
            # With key 8 the table is nearly full.
            trained.train([{"f": np.array([0, 8])}])
            first, *left, last = trained.keys()
            assert (first, last) == (0, 8) and len(left) == num_leaving
            assert trained.read([0, *left, 8])[:, 0].tolist() == [-2, *[-1] * num_leaving, -1]
            trained.train([{"f": np.array([*left, 1])}])
            assert trained.read([*left, 1])[:, 0].tolist() == [*[-2] * num_leaving, -1]


def test_keys_that_are_evicted_inside_passes_come_again_as_new():
    with Stored([js.FeatureSpec("f", dynamic())]) as trained:
        store, gone = trained.store, {0: 1, 3: 2}
        data = [batch_of({"f": np.array([key])}) for key in (1, 2, 3, 1)]
        for number, p in enumerate(store.passes(data, batches_per_pass=1)):
            trained.state = store.enter(trained.state, p)
            if number in gone:
                assert store.evict("t", [gone[number], 99]) == 1
        # The first before the pass after next, the second behind the last pass.
        stats = store.stats()["t"]
        assert (stats["inserts"], stats["evictions"]) == (4, 2)
        assert trained.keys() == [1, 3]


@pytest.mark.parametrize("eviction", [js.LRU(), js.LFU(), js.TTL(steps=3)], ids=str)
def test_what_happens_to_keys_does_not_depend_on_passes_or_tiers(eviction, tmp_path):
    rng = np.random.default_rng(2)
    batches = [{"f": rng.zipf(1.3, 6) % 90} for _ in range(60)]
    results = []
    for tiers, devices, most in (
        (None, 1, 1),
        (None, 1, 7),
        (js.Tiers(device_rows=8), 1, None),
        (js.Tiers(device_rows=12), 4, 3),
        (js.Tiers(device_rows=8, host_rows=3, ssd=[tmp_path]), 1, None),
    ):
        keys = {"admission": js.CountAdmission(2), "eviction": eviction}
        table = dynamic("t", 20, 2, js.Adagrad(0.5), tiers, **keys)
        with Stored([js.FeatureSpec("f", table)], devices) as trained:
            trained.train(batches, batches_per_pass=most)
            kept = trained.keys()
            results.append((kept, trained.read(kept).tobytes(), trained.slots(kept)))
            stats = trained.store.stats()["t"]
            assert stats["evictions"] > 5
            # Rows that were given up are nowhere.
            on_tiers = [stats[f"{tier}_rows"] for tier in ("device", "host", "ssd")]
            assert sum(on_tiers) == len(kept)
    first = results[0]
    for keys, rows, slots in results[1:]:
        assert keys == first[0]
        assert rows == first[1]
        assert slots["accumulator"].tobytes() == first[2]["accumulator"].tobytes()


def test_reused_rows_are_as_new():
    rng = np.random.default_rng(7)
    table = dynamic("t", 4, 2, js.Adam(0.1, per_row_count=True), eviction=js.LRU())
    with Stored([js.FeatureSpec("f", table)]) as trained:
        for _ in range(12):
            key = int(rng.integers(0, 10**6))
            initial = trained.read([key])
            trained.train([{"f": np.array([key])}])
            assert np.allclose(trained.read([key]), initial - 0.1, atol=1e-6)
            slots = trained.slots([key])
            assert slots["count"].tolist() == [1]
            assert np.allclose(slots["m"], 0.1) and np.allclose(slots["v"], 0.001)
        assert len(trained.keys()) == 4
