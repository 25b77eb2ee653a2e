# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a checkpoint of a row store is said, and nothing is changed by it."""

from __future__ import annotations

import resource
import signal

import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.ckpt import SaveError
from jaxsparse.store.ssd import StoreError
from jaxsparse.testing import assert_trees_equal
from tests.store.checkpoints import SETUPS, contents, load, log, restore, save, stored
from tests.store.stores import Stored, dynamic


@pytest.fixture(name="saved")
def saved_with_14_keys(tmp_path):
    with stored(SETUPS["ram"](None)) as trained:
        trained.train([{"f": np.arange(8), "g": np.arange(6, 14)}])
        return save(trained, tmp_path / "saved")


def refused(path, trained, text):
    before = trained.state.slabs[0]
    with pytest.raises(js.CheckpointError, match=text):
        restore(path, trained)
    assert not before.is_deleted()
    assert trained.keys() == []


def test_a_table_that_is_too_small(saved):
    text = r"saved: table 't': the saved table has 14 rows, this one has room for 13; raise Dynamic"
    with stored(None, capacity=13) as small:
        refused(saved, small, text)
    with stored(js.Tiers(device_rows=3), capacity=14) as enough:
        assert restore(saved, enough).keys() == list(range(14))


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (dynamic("t", dim=3), r"tables/t: embedding_dim was 2, is 3"),
        (dynamic("t", optimizer=js.Adagrad(0.1), admission=js.CountAdmission(2)), "'all', is 'Cou"),
        (dynamic("t", optimizer=js.SGD(1.0)), "tables/t: optimizer was 'Adagrad', is 'SGD'"),
        (dynamic("t", optimizer=js.Adagrad(0.1), eviction=js.TTL(seconds=1.0)), "times was False"),
        (js.TableSpec("t", vocabulary_size=9, embedding_dim=2), r"tables/t: keys was 'dynamic"),
    ],
)
def test_a_table_that_means_something_else(table, text, saved):
    beside = dynamic("u", 9)
    features = [js.FeatureSpec("f", table), js.FeatureSpec("g", table), js.FeatureSpec("h", beside)]
    with Stored(features) as other, pytest.raises(js.CheckpointError, match=text):
        load(saved, other, allow_new=True)


@pytest.mark.parametrize("array", ["rows", "slot.accumulator", "keys", "hotness"])
@pytest.mark.parametrize("harm", ["flipped", "missing"])
def test_a_damaged_block(array, harm, saved):
    block = max((saved / "tables" / "t" / array / "0").rglob("c*"), key=lambda p: p.is_file())
    if harm == "missing":
        block.unlink()
    else:
        data = bytearray(block.read_bytes())
        data[len(data) // 2] ^= 1
        block.write_bytes(bytes(data))
    with (
        stored(None) as other,
        pytest.raises(js.CheckpointError, match=rf"tables/t/{array}/0: .*damaged"),
    ):
        restore(saved, other)


def test_a_save_in_the_middle_of_passes(tmp_path):
    with stored(None) as trained:
        batch = js.Batch({name: np.arange(4) for name in "fg"}, labels=np.zeros(4))
        passes = trained.store.passes([batch])
        trained.state = trained.store.enter(trained.state, next(passes))
        with pytest.raises(RuntimeError, match="save: passes are under way"):
            save(trained, tmp_path / "saved")
        passes.close()
        assert not (tmp_path / "saved").exists()


def test_values_that_are_not_finite(tmp_path):
    with stored(SETUPS["ram"](None)) as trained:
        keys = np.arange(4)
        trained.train([{"f": keys, "g": keys}], [{"f": np.full((4, 2), np.inf)}])
        with pytest.raises(SaveError, match=r"tables/t/rows: 8 values are not finite"):
            save(trained, tmp_path / "saved")
        assert not (tmp_path / "saved").exists()


def test_a_damaged_segment_stops_a_save(tmp_path):
    with stored(SETUPS["ssd"](tmp_path / "disk")) as trained:
        trained.train(log(0, 12))
        trained.store.flush(trained.state)
        (segment, *_) = (tmp_path / "disk").rglob("segment-*")
        data = bytearray(segment.read_bytes())
        for at in range(len(data) // 2, len(data)):
            data[at] ^= 1
        segment.write_bytes(bytes(data))
        with pytest.raises(StoreError, match=r"table 't'.*segment"):
            save(trained, tmp_path / "saved")
        assert not (tmp_path / "saved").exists()


def test_e17_a_full_disk_stops_the_save_alone(tmp_path):
    """Field case E17, of checkpoints: that of the tier itself is in test_e_stores.py."""
    with stored(SETUPS["ram"](None), capacity=3000) as trained:
        first = save(trained, tmp_path / "first")
        for start in range(0, 2400, 8):
            trained.train([{"f": np.arange(start, start + 8), "g": np.arange(start, start + 8)}])
        before = contents(trained)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, limits[1]))
            with pytest.raises(SaveError, match=r"second: cannot be saved"):
                save(trained, tmp_path / "second")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert_trees_equal(contents(trained), before)
        assert [path.name for path in tmp_path.iterdir()] == ["first"]
        save(trained, tmp_path / "second")
    with stored(None, capacity=3000) as other:
        assert restore(first, other).keys() == []
        assert_trees_equal(contents(restore(tmp_path / "second", other)), before)
