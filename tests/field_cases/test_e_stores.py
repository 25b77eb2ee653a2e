# SPDX-License-Identifier: Apache-2.0
"""Field cases E: keys that come and go, admission, eviction, rows in memory and on disks.

Decided here: a batch with more keys than there is room is an error that changes nothing; evicted
keys come back as new; a store of one process is refused to others; a full disk stops training with
all rows where they can be read.
"""

from __future__ import annotations

import collections
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.store import RowReader
from jaxsparse.store.ssd import LockedError, NoSpaceError, SegmentStore
from tests.field_cases.layers import on_1_and_4
from tests.store.stores import Stored, batch_of, dynamic, look, unpadded

ZERO = js.constant(0.0)


def feature(**options):
    return [js.FeatureSpec("f", dynamic(**options))]


def batches(*keys):
    return [{"f": np.array(batch)} for batch in keys]


def counters(trained, keys):
    """Occurrences of keys that have a row."""
    known = trained.store._tables["t"].known
    return known.counters.count[known.index.find(np.array(keys, np.uint64))].tolist()


def test_e02_more_keys_at_once_than_there_is_room():
    with Stored(feature(capacity=8, eviction=js.LRU())) as trained:
        trained.train(batches(range(8)))
        with pytest.raises(js.StoreFullError, match="needs 20 rows at once, the table has 8"):
            trained.train(batches(range(100, 120)))
        assert trained.keys() == list(range(8))
        assert trained.store.stats()["t"]["size"] == 8


def test_e03_a_reused_row_does_not_inherit_its_frequency():
    with Stored(feature(capacity=3, eviction=js.LFU())) as trained:
        trained.train(batches([1] * 100, [2, 2], [3, 3]))
        assert trained.store.evict("t", [1, 77]) == 1
        trained.train(batches([4]))
        assert counters(trained, [4]) == [1]
        trained.train(batches([5]))
        assert trained.keys() == [2, 3, 5]


@on_1_and_4
@pytest.mark.parametrize("places", [None, 4], ids=["all", "tiers"])
def test_e04_occurrences_are_counted_once_each(devices, places):
    tiers = None if places is None else js.Tiers(device_rows=places)
    with Stored(feature(tiers=tiers), devices) as trained:
        trained.train(batches([7, 7, 7, 1], [2, 3, 4, 5], [7, 7, 1, 1]))
        assert counters(trained, [7, 1, 2]) == [5, 3, 1]


def test_e05_rows_stay_with_their_keys_while_the_table_grows():
    table = dynamic("t", 10_000, 2, js.SGD(1.0), js.Tiers(device_rows=300), initializer=ZERO)
    with Stored([js.FeatureSpec("f", table)]) as trained:
        for start in range(0, 6000, 300):
            keys = np.arange(start, start + 300)
            trained.train([{"f": keys}], [{"f": np.repeat(-keys[:, None], 2, axis=1)}])
        keys = np.arange(6000)
        assert (trained.read(keys) == keys[:, None]).all()
        assert counters(trained, keys) == [1] * 6000


def test_e07_eviction_from_another_thread_while_training():
    table = dynamic("t", 200, 1, js.SGD(1.0), js.Tiers(device_rows=60), initializer=ZERO)
    rng = np.random.default_rng(0)
    data = [rng.integers(0, 100, 50) for _ in range(150)]
    with Stored([js.FeatureSpec("f", table)]) as trained:
        done = threading.Event()
        errors = []

        def evict():
            other = np.random.default_rng(1)
            try:
                while not done.is_set():
                    trained.store.evict("t", other.integers(0, 100, 3))
                    trained.store.stats()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=evict)
        thread.start()
        try:
            trained.train(batches(*data))
        finally:
            done.set()
            thread.join()
        assert errors == []
        keys = trained.keys()
        stats = trained.store.stats()["t"]
        assert stats["evictions"] > 10
        assert stats["inserts"] == stats["evictions"] + len(keys)
        # Each row has moved once for every occurrence since it was made.
        assert (-trained.read(keys)[:, 0]).tolist() == counters(trained, keys)


def test_e09_lookups_of_many_threads_get_their_own_rows():
    """Rows by key, and batches through a reader that all threads share."""
    tiers = js.Tiers(device_rows=40)
    with Stored(feature(capacity=200, tiers=tiers, optimizer=js.SGD(0.125))) as trained:
        trained.train(batches(*np.arange(200).reshape(5, 40)))
        rows = trained.read(range(200))
        assert len(np.unique(rows, axis=0)) == 200
        readers = [RowReader(trained.store) for _ in range(13)]  # a new one has to choose sizes
        begin = threading.Barrier(8)

        def lookups(thread):
            rng = np.random.default_rng(thread)
            for number in range(125):
                keys = rng.integers(200, size=rng.integers(1, 150))
                if number % 10:
                    got = trained.read(keys)
                else:
                    keys = rng.permutation(200)[: rng.choice([1, 70, 150])]
                    reader = readers[number // 10]
                    begin.wait(60)
                    loaded = reader.load(trained.state, batch_of({"f": keys}))
                    acts = look(loaded.emb, loaded.state, loaded.batch.ids)
                    got = unpadded(acts, loaded.batch)["f"]
                assert got.shape == (keys.size, 2)
                assert got.tobytes() == rows[keys].tobytes()
            return number + 1

        with ThreadPoolExecutor(8) as threads:
            assert sum(threads.map(lookups, range(8))) == 1000


@on_1_and_4
def test_e08_rows_read_ahead_do_not_disturb_those_in_use(devices):
    tiers = js.Tiers(device_rows=4)
    data = batches([1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4], [8, 7, 2, 1]) * 3
    results = []
    for setup in (tiers, None):
        with Stored(feature(tiers=setup, optimizer=js.Adagrad(1.0)), devices) as trained:
            acts, _ = trained.train(data)
            results.append(([a["f"].tobytes() for a in acts], trained.read(range(9)).tobytes()))
    assert results[0] == results[1]


def test_e12_slots_travel_with_their_rows(tmp_path):
    rule = js.Adam(0.1, per_row_count=True)
    tiers = js.Tiers(device_rows=2, host_rows=2, ssd=[tmp_path])
    data = batches([1, 2], [3, 4], [5, 6], [7, 8], [1, 5], [2, 3])
    results = []
    for setup in (tiers, None):
        with Stored(feature(tiers=setup, optimizer=rule)) as trained:
            trained.store.flush(trained.state)  # before the first step
            trained.train(data)
            slots = trained.slots(range(1, 9))
            results.append([slots[name].tobytes() for name in sorted(slots)])
            assert slots["count"].tolist() == [2, 2, 2, 1, 2, 1, 1, 1]
            if setup:
                assert trained.store.stats()["t"]["ssd_read_bytes"] > 0
    assert results[0] == results[1]


def test_e13_reading_twice_gives_the_same_and_writes_nothing(tmp_path):
    tiers = js.Tiers(device_rows=2, host_rows=2, ssd=[tmp_path])
    with Stored(feature(tiers=tiers)) as trained:
        trained.train(batches([1, 2], [3, 4], [5, 6]))
        first = trained.read(range(8)).tobytes()
        before = trained.store.stats()["t"]
        assert trained.read(range(8)).tobytes() == first
        after = trained.store.stats()["t"]
        written = ["ram_written_bytes", "ssd_written_bytes", "size", "inserts", "lookups"]
        assert [after[name] for name in written] == [before[name] for name in written]
        assert after["ssd"]["appended_rows"] == before["ssd"]["appended_rows"]


@on_1_and_4
def test_e14_tables_of_all_tiers_side_by_side(devices, tmp_path):
    setups = {
        "a": None,
        "b": js.Tiers(device_rows=10),
        "c": js.Tiers(device_rows=10, host_rows=0, ssd=[tmp_path]),
    }
    data = [
        {f"f{n}": np.arange(s, s + 8) + i for i, n in enumerate(setups)} for s in range(0, 40, 4)
    ]
    results = []
    for tiered in (True, False):
        features = [
            js.FeatureSpec(f"f{n}", dynamic(n, tiers=tiers if tiered else None))
            for n, tiers in setups.items()
        ]
        with Stored(features, devices) as trained:
            acts, _ = trained.train(data)
            rows = [trained.read(range(50), name).tobytes() for name in setups]
            results.append(([a[f].tobytes() for a in acts for f in a], rows))
    assert results[0] == results[1]
    with pytest.raises(ValueError, match="Tiers: device_rows must be an int >= 1, got 0"):
        js.Tiers(device_rows=0)


HOLDER = """
import sys, time
import numpy as np
from pathlib import Path
from jaxsparse.store.ssd import SegmentStore

store = SegmentStore([Path(sys.argv[1])], table="t", row_bytes=8)
print("ready", flush=True)
time.sleep(600)
"""


def test_e15_a_store_of_another_process_is_refused_and_taken_over_when_that_is_dead(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path / "t")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "ready\n"
        options = {"tiers": js.Tiers(device_rows=2, host_rows=0, ssd=[tmp_path])}
        with pytest.raises(LockedError, match=str(holder.pid)):
            Stored(feature(**options))
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    with Stored(feature(**options)) as trained:
        trained.train(batches([1, 2], [3, 4]))
        assert trained.store.stats()["t"]["ssd_rows"] == 2


@on_1_and_4
def test_e19_rows_on_the_host_are_not_the_buffers_they_came_from(devices):
    """Rows leave for the host and come from it in programs of their own, by row numbers that are
    arguments; what was copied stays, whatever becomes of the buffers and arrays on either side."""
    setup = {"optimizer": js.Adagrad(1.0), "initializer": ZERO}
    with Stored(feature(tiers=js.Tiers(device_rows=4), **setup), devices) as trained:
        trained.train(batches([1, 2, 3, 4]))
        first = trained.read([1, 2])
        seen = first.copy()
        given = np.full((2, 2), 7.0, np.float32)
        trained.state = trained.store.write(trained.state, "t", [3, 4], given)
        given[:] = np.nan
        old = trained.state
        trained.train(batches([5, 6, 7, 8], [9, 10, 11, 12]))  # 1 to 4 leave, `old` is donated
        assert all(leaf.is_deleted() for leaf in old.slabs)
        del old
        assert first.tobytes() == seen.tobytes()
        assert trained.store.stats()["t"]["host_rows"] == 8
        assert trained.read([1, 2]).tobytes() == seen.tobytes()
        assert trained.read([3, 4]).tolist() == [[7.0, 7.0]] * 2
        trained.train(batches([1, 3, 5, 9]))
        assert trained.read([2, 4]).tolist() == [seen[1].tolist(), [7.0, 7.0]]


def test_e17_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    tiers = js.Tiers(device_rows=4, host_rows=2, ssd=[tmp_path])
    append = SegmentStore.append

    def full(self, keys, rows):
        if self.stats()["appended_rows"] + len(keys) > 8:
            raise NoSpaceError(f"table 't': no space in {tmp_path}")
        return append(self, keys, rows)

    monkeypatch.setattr(SegmentStore, "append", full)
    with Stored(feature(tiers=tiers, initializer=ZERO)) as trained:
        seen = collections.Counter()
        with pytest.raises(NoSpaceError, match=f"no space in {tmp_path}"):
            for start in range(0, 40, 4):
                keys = np.arange(start, start + 4)
                trained.train([{"f": keys}, {"f": keys}])
                seen.update([*keys.tolist()] * 2)
        assert len(seen) >= 12
        rows = trained.read(range(max(seen) + 1))
        for key, count in seen.items():
            assert rows[key].tolist() == [-count, -count]
