# SPDX-License-Identifier: Apache-2.0
"""Passes that only read change neither contents, index nor counters."""

from __future__ import annotations

import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.store import RowReader
from tests.store.stores import Stored, batch_of, dynamic, look, unpadded


def trained_store(devices=1, **keys):
    table = dynamic("t", 40, 2, js.Adagrad(1.0), js.Tiers(device_rows=8), **keys)
    trained = Stored([js.FeatureSpec("f", table)], devices)
    trained.train([{"f": np.arange(s, s + 4)} for s in (0, 4, 8, 12, 0, 4)])
    return trained


def contents(trained):
    keys = trained.store.keys("t")
    known = trained.store._tables["t"].known
    rows = known.index.find(keys)
    stats = trained.store.stats()["t"]
    counted = [stats[n] for n in ("size", "lookups", "hits", "inserts", "evictions")]
    arrays = [keys, trained.read(keys), trained.slots(keys)["accumulator"]]
    arrays += [known.counters.count[rows], known.counters.last[rows], known.hotness.of(rows)]
    return counted, [array.tobytes() for array in arrays]


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("batches_per_pass", [None, 1, 5])
def test_evaluation_reads_what_training_left(devices, batches_per_pass):
    with trained_store(devices) as trained:
        want = {key: trained.read([key])[0] for key in (*range(16), 99, 2**64 - 1)}
        before = contents(trained)
        batches = [
            np.array([3, 99, 7, 3], np.uint64),
            np.array([15, 14, 13, 12], np.uint64),
            np.array([2**64 - 1, 99, 0, 1], np.uint64),
        ]
        acts = trained.evaluate([{"f": b} for b in batches], batches_per_pass=batches_per_pass)
        for keys, act in zip(batches, acts, strict=True):
            assert act["f"].tolist() == [want[int(key)].tolist() for key in keys]
        assert contents(trained) == before
        # And training goes on as if nothing had been, though it finds other rows on the devices.
        with trained_store(devices) as other:
            more = [{"f": np.arange(s, s + 4)} for s in (2, 20, 10)]
            mine, others = trained.train(more)[0], other.train(more)[0]
            pairs = zip(mine, others, strict=True)
            assert all(a["f"].tobytes() == b["f"].tobytes() for a, b in pairs)
            assert contents(trained)[1] == contents(other)[1]


def test_keys_that_were_not_admitted_evaluate_with_the_default_row():
    with trained_store(admission=js.CountAdmission(2)) as trained:
        assert trained.keys() == list(range(8))
        default = trained.read([99])
        (acts,) = trained.evaluate([{"f": np.array([99, 9, 3])}])
        assert acts["f"][:2].tolist() == [default[0].tolist()] * 2
        assert acts["f"][2].tolist() == trained.read([3])[0].tolist()
        assert trained.keys() == list(range(8))


def test_a_table_that_is_all_on_the_devices_and_full_still_evaluates_unknown_keys():
    with Stored([js.FeatureSpec("f", dynamic("t", 4))]) as trained:
        trained.train([{"f": np.arange(4)}])
        rows = trained.read(np.arange(10))
        acts = trained.evaluate([{"f": np.array([8, 9, 0])}, {"f": np.arange(4)}])
        assert acts[0]["f"].tolist() == rows[[8, 9, 0]].tolist()
        assert acts[1]["f"].tolist() == rows[:4].tolist()
        assert trained.read(np.arange(10)).tobytes() == rows.tobytes()


def test_a_batch_that_does_not_fit_is_refused():
    with trained_store() as trained:
        with pytest.raises(js.StoreFullError, match=r"one batch needs 9 rows .* the table has 8"):
            trained.evaluate([{"f": np.arange(30, 39)}])
        (acts,) = trained.evaluate([{"f": np.arange(30, 38)}])
        assert acts["f"].shape == (8, 2)


def test_rows_are_read_beside_training_for_empty_bags_too():
    table = dynamic("t", 8, 2, initializer=js.constant(3.0))
    with Stored([js.FeatureSpec("f", table, combiner="sum")]) as trained:
        reader = RowReader(trained.store)
        for lengths, want in (([0, 0], [0, 0]), ([2, 0], [6, 0])):
            bags = js.Ragged.from_lengths(np.arange(sum(lengths)), np.array(lengths))
            loaded = reader.load(trained.state, batch_of({"f": bags}))
            acts = unpadded(look(loaded.emb, loaded.state, loaded.batch.ids), loaded.batch)
            assert acts["f"].tolist() == [[value] * 2 for value in want]
