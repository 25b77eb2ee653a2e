# SPDX-License-Identifier: Apache-2.0
"""Who stays on the devices: close to the best possible set, also after hot keys have changed."""

from __future__ import annotations

import numpy as np

import jaxsparse as js
from jaxsparse.store.hotness import MAX_WEIGHT, Hotness, coldest
from tests.store.stores import Stored, batch_of, dynamic

NUM_KEYS, NUM_PLACES, SAMPLES = 40_000, 4_000, 1024
EXPONENT = 1.05
BATCHES, STEADY, CHANGED = 2, 80, 10
"""Batches of a pass; passes before and after the hot keys are exchanged."""


def test_hits_are_those_of_the_hottest_keys():
    rng = np.random.default_rng(0)
    mass = np.arange(1, NUM_KEYS + 1) ** -EXPONENT
    mass /= mass.sum()
    best = mass[:NUM_PLACES].sum()
    exchanged = rng.permutation(NUM_KEYS)

    def batches():
        for number in range(BATCHES * (STEADY + CHANGED)):
            ranks = rng.choice(NUM_KEYS, SAMPLES, p=mass)
            yield batch_of({"f": ranks if number < BATCHES * STEADY else exchanged[ranks]})

    table = dynamic("t", NUM_KEYS, 1, tiers=js.Tiers(device_rows=NUM_PLACES))
    rates = []
    with Stored([js.FeatureSpec("f", table)]) as trained:
        for p in trained.store.passes(batches(), batches_per_pass=BATCHES):
            trained.state = trained.store.enter(trained.state, p)
            rates.append(p.facts["hit_rate"])
    assert len(rates) == STEADY + CHANGED
    print(f"share of the best: {np.array(rates[STEADY - 10 :]) / best}")
    assert np.mean(rates[STEADY - 20 : STEADY]) >= 0.95 * best
    assert rates[STEADY] < 0.3 * best
    assert rates[-1] >= 0.9 * best


def test_rows_of_the_next_pass_stay_though_they_are_colder():
    table = dynamic("t", 9, 2, tiers=js.Tiers(device_rows=4))
    with Stored([js.FeatureSpec("f", table)]) as trained:
        keys = [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
        _, facts = trained.train([{"f": np.array(k)} for k in keys], batches_per_pass=1)
    # For keys 4 and 5 those go that came later than 0 and 1, and come back for the last pass.
    assert [one["host_to_device_bytes"] > 0 for one in facts] == [False] * 4 + [True]


def test_scores_decay_by_batches():
    hotness = Hotness(half_life=2)
    hotness.add(np.array([0, 1], np.int32), np.array([4, 1]))
    hotness.add(np.array([], np.int32), np.array([], np.int64))
    hotness.add(np.array([1, 3], np.int32), np.array([1, 2]))
    scores = hotness.of(np.arange(4, dtype=np.int32))
    np.testing.assert_allclose(scores / scores[3], [1, 0.75, 0, 1], rtol=1e-6)
    hotness.forget(np.array([0], np.int32))
    assert hotness.of(np.array([0, 9], np.int32)).tolist() == [0, 0]


def test_scores_never_overflow():
    hotness = Hotness(half_life=0.25)
    rows = np.array([0, 1], np.int32)
    for _ in range(200):
        hotness.add(rows, np.array([1, 2]))
    scores = hotness.of(rows)
    assert np.isfinite(scores).all() and 0 < scores.max() < 2 * MAX_WEIGHT * 3
    assert scores[1] / scores[0] == 2


def test_coldest():
    scores = np.float32([3, 1, 2, 0])
    assert sorted(coldest(scores, 2)) == [1, 3]
    assert sorted(coldest(scores, 9)) == [0, 1, 2, 3]
    assert coldest(scores, 0).size == 0
