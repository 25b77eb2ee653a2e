# SPDX-License-Identifier: Apache-2.0
"""Training through a row store equals the oracle, wherever rows lie."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.testing import count_compiles
from tests.oracle import OracleCollection, assert_rows, pooled_lookup
from tests.store.stores import Stored, dynamic

NUM_KEYS = 1600
NUM_STEPS = 200
SAMPLES = 16
BAG_LENGTHS = np.resize([2, 0, 1, 3], SAMPLES)
RULE = {"rule": "adam", "learning_rate": 0.05, "per_row_count": True}
SETUPS = {
    "device": lambda folder: None,
    "ram": lambda folder: js.Tiers(device_rows=NUM_KEYS // 20),
    "ssd": lambda folder: js.Tiers(
        device_rows=NUM_KEYS // 20, host_rows=NUM_KEYS // 10, ssd=[folder / "a", folder / "b"]
    ),
}


def keys_of(ranks):
    """64-bit keys, the top ones among them."""
    return ~(ranks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


@functools.cache
def log():
    """Batches and gradients: a key drawn by Zipf's law, and weighted bags of the same keys."""
    rng = np.random.default_rng(5)

    def draw(size):
        return keys_of((NUM_KEYS ** rng.random(size)).astype(np.int64) - 1)

    batches, grads = [], []
    for _ in range(NUM_STEPS):
        weights = rng.normal(size=BAG_LENGTHS.sum()).astype(np.float32)
        bags = js.Ragged.from_lengths(draw(BAG_LENGTHS.sum()), BAG_LENGTHS, weights)
        batches.append({"one": draw(SAMPLES), "bag": bags, "seq": draw((SAMPLES, 2))})
        shapes = {"one": (SAMPLES, 3), "bag": (SAMPLES, 3), "seq": (SAMPLES, 2, 3)}
        grads.append({n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()})
    return batches, grads


def features_of(setup, folder):
    optimizer = js.Adam(0.05, per_row_count=True)
    table = dynamic("t", NUM_KEYS, 3, optimizer, SETUPS[setup](folder), "sharded")
    return [
        js.FeatureSpec("one", table),
        js.FeatureSpec("bag", table, combiner="mean"),
        js.FeatureSpec("seq", table, combiner=None, max_length=2),
    ]


def lists(entry):
    """A feature of a batch as the oracle takes it."""
    if isinstance(entry, js.Ragged):
        bags = [[int(key) for key in bag] for bag in entry]
        ends = np.cumsum(BAG_LENGTHS)[:-1]
        return bags, [part.tolist() for part in np.split(entry.weights, ends)]
    return [[int(key) for key in np.atleast_1d(row)] for row in entry]


@functools.cache
def run_on_devices_alone():
    """200 steps with all rows on one device: keys, rows, slots, activations."""
    return run("device", 1, None)


def run(setup, devices, folder):
    batches, grads = log()
    half = NUM_STEPS // 2
    with Stored(features_of(setup, folder), devices) as trained:
        initial = trained.read(all_keys())
        first, _ = trained.train(batches[:half], grads[:half])
        with count_compiles() as count:
            second, facts = trained.train(batches[half:], grads[half:])
        assert count.programs == 0
        keys = trained.store.keys("t")
        trained.store.flush(trained.state)
        stats = trained.store.stats()["t"]
        return {
            "initial": initial,
            "keys": keys,
            "rows": trained.read(keys),
            "slots": trained.slots(keys),
            "acts": first + second,
            "facts": facts,
            "stats": stats,
        }


def all_keys():
    return np.sort(keys_of(np.arange(NUM_KEYS)))


@functools.cache
def oracle():
    batches, grads = log()
    initial = dict(zip(all_keys().tolist(), run_on_devices_alone()["initial"], strict=True))
    tables = {"t": {"dim": 3, "rows": initial, **RULE}}
    features = [
        {"name": "one", "table": "t"},
        {"name": "bag", "table": "t", "combiner": "mean"},
        {"name": "seq", "table": "t", "combiner": None, "max_length": 2},
    ]
    model = OracleCollection(tables, features)
    for step, (batch, grad) in enumerate(zip(batches, grads, strict=True)):
        model.update({name: lists(entry) for name, entry in batch.items()}, grad, step)
    return model


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("setup", SETUPS)
def test_200_steps_equal_the_oracle(setup, devices, tmp_path):
    got, alone = run(setup, devices, tmp_path), run_on_devices_alone()
    seen = sorted(oracle().travel["t"])
    assert got["keys"].tolist() == seen
    assert got["stats"]["size"] == len(seen) > 0.7 * NUM_KEYS
    assert_rows(got["rows"], oracle().read("t", seen), oracle().travelled("t", seen))
    slots = oracle().read_slots("t", seen)
    assert np.array_equal(got["slots"]["count"], slots["count"])
    np.testing.assert_allclose(got["slots"]["v"], slots["v"], rtol=1e-5)
    if devices == 1:
        for name in ("initial", "keys", "rows"):
            assert got[name].tobytes() == alone[name].tobytes(), name
        for name, slot in got["slots"].items():
            assert slot.tobytes() == alone["slots"][name].tobytes(), name
        for mine, other in zip(got["acts"], alone["acts"], strict=True):
            assert all(mine[name].tobytes() == other[name].tobytes() for name in mine)
    if setup != "device":
        assert got["stats"]["device_rows"] <= NUM_KEYS // 20
        assert sum(facts["host_to_device_bytes"] for facts in got["facts"]) > 0
    if setup == "ssd":
        assert got["stats"]["host_rows"] <= NUM_KEYS // 10
        assert got["stats"]["ssd_rows"] > 0.4 * NUM_KEYS
        assert got["stats"]["ssd_read_bytes"] > 0


def test_activations_equal_the_oracle():
    """Of the first steps: there, rows are still known exactly."""
    batches, _ = log()
    alone = run_on_devices_alone()
    rows = dict(zip(all_keys().tolist(), alone["initial"].astype(np.float64), strict=True))
    want, absolute = pooled_lookup(lists(batches[0]["bag"]), rows, 3, "mean")
    assert np.all(np.abs(alone["acts"][0]["bag"] - want) <= 1e-6 * absolute + 1e-30)
