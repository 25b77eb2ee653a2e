# SPDX-License-Identifier: Apache-2.0
"""Field cases E of row stores that are saved.

Decided here: a save waits for nothing but keeps threads that evict waiting; it is refused while
passes are under way. An array that is missing is an error, not an initial value.
"""

from __future__ import annotations

import shutil
import threading

import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.testing import assert_trees_equal
from tests.store.checkpoints import SETUPS, contents, restore, save, stored
from tests.store.stores import Stored, dynamic


def counts(trained, keys):
    """Occurrences of keys since they have a row; below 0 those of keys that wait for one."""
    known = trained.store._tables["t"].known
    words = np.array(keys, np.uint64)
    rows = known.index.find(words)
    waiting = known.admitter.counts(words)
    counted = [int(known.counters.count[row]) if row >= 0 else 0 for row in rows]
    return [count or -int(wait) for count, wait in zip(counted, waiting, strict=True)]


@pytest.mark.parametrize("eviction", [None, js.LRU(), js.L2Norm(below=100.0), js.TTL(steps=50)])
def test_e06_counts_of_keys_without_a_row_are_restored_and_a_save_evicts_nothing(
    eviction, tmp_path
):
    options = {"admission": js.CountAdmission(3), "eviction": eviction, "capacity": 8}
    table = dynamic("t", **options)
    with Stored([js.FeatureSpec("f", table)]) as trained:
        trained.train([{"f": np.array(batch)} for batch in ([1, 2, 3], [2, 3], [3])])
        assert trained.keys() == [3] and counts(trained, [1, 2, 3]) == [-1, -2, 1]
        save(trained, tmp_path / "saved")
        assert trained.keys() == [3] and counts(trained, [1, 2, 3]) == [-1, -2, 1]
    with Stored([js.FeatureSpec("f", table)], seed=5) as other:
        restore(tmp_path / "saved", other)
        assert other.keys() == [3] and counts(other, [1, 2, 3]) == [-1, -2, 1]
        other.train([{"f": np.array([1, 2])}])
        assert other.keys() == [2, 3] and counts(other, [1]) == [-2]


def test_e10_a_save_beside_a_thread_that_evicts_is_of_one_moment(tmp_path):
    table = dynamic(
        "t", 6000, 1, js.Adagrad(1.0), js.Tiers(device_rows=100), initializer=js.constant(0.0)
    )
    with Stored([js.FeatureSpec("f", table)]) as trained:
        for start in range(0, 5000, 100):
            trained.train([{"f": np.arange(start, start + 100)}])
        done, errors = threading.Event(), []

        def evict():
            rng = np.random.default_rng(0)
            try:
                while not done.is_set():
                    trained.store.evict("t", rng.integers(0, 5000, 5))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=evict)
        thread.start()
        try:
            for number in range(5):
                save(trained, tmp_path / str(number))
        finally:
            done.set()
            thread.join()
        assert errors == []
    sizes = []
    for number in range(5):
        with Stored([js.FeatureSpec("f", table)], seed=1) as other:
            restore(tmp_path / str(number), other)
            keys = other.keys()
            sizes.append(len(keys))
            # One gradient of 1 each: rows and slots are those of the same moment.
            assert (other.slots(keys)["accumulator"] == np.float32(1.1)).all()
            np.testing.assert_allclose(other.read(keys), -1 / np.sqrt(1.1), rtol=1e-6)
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0] <= 5000


def test_e10_an_array_that_is_missing_is_an_error(tmp_path):
    with stored(None) as trained:
        trained.train([{"f": np.arange(8), "g": np.arange(8)}])
        path = save(trained, tmp_path / "saved")
    shutil.rmtree(path / "tables" / "t" / "slot.accumulator")
    text = r"tables/t/slot.accumulator/0: cannot be read"
    with stored(None) as other, pytest.raises(js.CheckpointError, match=text):
        restore(path, other)


def test_e11_more_rows_are_restored_than_the_devices_hold(tmp_path):
    table = dynamic("t", 2000, 2, js.Adam(0.1))
    with Stored([js.FeatureSpec("f", table)]) as trained:
        trained.train([{"f": np.arange(1000)}, {"f": np.arange(0, 1000, 3)}])
        want = contents(trained)
        save(trained, tmp_path / "saved")
    for name in ("ram", "ssd"):
        small = dynamic("t", 2000, 2, js.Adam(0.1), SETUPS[name](tmp_path / name))
        with Stored([js.FeatureSpec("f", small)], seed=4) as other:
            restore(tmp_path / "saved", other)
            assert_trees_equal(contents(other), want)
            stats = other.store.stats()["t"]
            assert (stats["device_rows"], stats["host_rows"] + stats["ssd_rows"]) == (16, 984)
            assert (stats["ssd_rows"] >= 976) == (name == "ssd")


def test_e12_slots_travel_through_tiers_and_saves(tmp_path):
    data = [{"f": np.arange(start, start + 6), "g": np.arange(6)} for start in (0, 9, 30, 0, 50, 3)]
    options = {"optimizer": js.Adam(0.1)}
    with stored(None, **options) as alone:
        alone.train(data)
        want = contents(alone)
    with stored(SETUPS["ssd"](tmp_path / "ssd"), **options) as trained:
        save(trained, tmp_path / "0")  # before any row was made
        restore(tmp_path / "0", trained)
        for step, batch in enumerate(data, 1):
            trained.train([batch])
            save(trained, tmp_path / str(step))
            restore(tmp_path / str(step), trained, step)
        assert_trees_equal(contents(trained), want)


def test_e13_saving_twice_gives_the_same_and_moves_nothing(tmp_path):
    with stored(SETUPS["ssd"](tmp_path / "ssd")) as trained:
        trained.train([{"f": np.arange(k, k + 8), "g": np.arange(8)} for k in range(0, 80, 8)])
        files = []
        before = trained.store.stats()["t"]
        for name in ("a", "b"):
            path = save(trained, tmp_path / name)
            tables = (path / "tables").rglob("*")
            files.append({p.relative_to(path): p.read_bytes() for p in tables if p.is_file()})
        assert files[0] == files[1] and len(files[0]) > 10
        after = trained.store.stats()["t"]
        for name in ("ram_written_bytes", "ssd_written_bytes", "size", "lookups", "evictions"):
            assert after[name] == before[name]
        assert after["ssd"]["appended_rows"] == before["ssd"]["appended_rows"]
