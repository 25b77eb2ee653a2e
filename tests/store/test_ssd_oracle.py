# SPDX-License-Identifier: Apache-2.0
"""The store against a dict, through any order of operations."""

from __future__ import annotations

import pathlib
import shutil
import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxsparse.store.ssd import journal
from tests.store.ssd_rows import keys_of, open_store, random_rows, row, rows_of

KEYS = st.lists(st.integers(0, 40), min_size=1, max_size=30, unique=True)


class AgainstDict(RuleBasedStateMachine):
    """``versions`` is what the store must hold, ``at`` where it says the rows are."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = pathlib.Path(tempfile.mkdtemp())
        # Segments of a few rows, and a log that is rotated often.
        self.options = {"segment_bytes": 8192 + 64 + 9 * 64}
        self.store = open_store(self.folder, **self.options)
        self.versions: dict[int, int] = {}
        self.at: dict[int, int] = {}
        self.next_version = 0

    @rule(keys=KEYS, release_old=st.booleans())
    def append(self, keys: list[int], release_old: bool) -> None:
        new = dict.fromkeys(keys, self.next_version)
        self.next_version += 1
        locations = self.store.append(keys_of(new), rows_of(new))
        old = [self.at[key] for key in keys if key in self.at]
        self.versions |= new
        self.at |= dict(zip(keys, locations.tolist(), strict=True))
        if release_old:
            self.store.release(np.array(old, np.int64))

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.at)), max_size=20))
        got = self.store.read(np.array([self.at[key] for key in keys], np.int64))
        assert [bytes(one) for one in got] == [row(key, self.versions[key]) for key in keys]

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Of a key that has no unreleased older row, which would come back."""
        _, locations = self.store.entries()
        assert sorted(locations.tolist()) == sorted(self.at.values())
        live = self.store.stats()["live_rows"]
        if live == len(self.at):
            key = data.draw(st.sampled_from(sorted(self.at)))
            self.store.release(np.array([self.at.pop(key)]))
            del self.versions[key]

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @rule(max_garbage=st.sampled_from([0.0, 0.3, 0.5]))
    def compact(self, max_garbage: float) -> None:
        old, new = self.store.compact(max_garbage)
        moved = dict(zip(old.tolist(), new.tolist(), strict=True))
        self.at = {key: moved.get(at, at) for key, at in self.at.items()}

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = open_store(self.folder, **self.options)
        assert self.store.stats()["live_rows"] == len(self.versions)
        keys, locations = self.store.entries()
        self.at = dict(zip(keys.tolist(), locations.tolist(), strict=True))

    @invariant()
    def holds_what_it_should(self) -> None:
        keys, locations = self.store.entries()
        assert sorted(keys.tolist()) == sorted(self.versions)
        got = dict(zip(keys.tolist(), self.store.read(locations), strict=True))
        assert {k: bytes(v) for k, v in got.items()} == {
            key: row(key, version) for key, version in self.versions.items()
        }

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


def run(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "TAIL_BYTES", 600)
    few = settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    case = AgainstDict.TestCase
    case.settings = few
    case("runTest").runTest()


def test_against_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    run(15, monkeypatch)


@pytest.mark.slow
def test_against_a_dict_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    run(150, monkeypatch)


def test_the_newest_of_several_rows_of_a_key_survives_compaction(tmp_path: pathlib.Path) -> None:
    """Even where the older one was moved behind it."""
    store = open_store(tmp_path)
    rng = np.random.default_rng(0)
    first = store.append(np.arange(600, dtype=np.uint64), random_rows(rng, 600))
    store.flush()
    newer = random_rows(rng, 300)
    store.append(np.arange(300, dtype=np.uint64), newer)
    store.release(first[300:])
    old, _ = store.compact(0.3)
    assert set(old.tolist()) & set(first[:300].tolist())
    store.close()
    store = open_store(tmp_path)
    keys, at = store.entries()
    order = np.argsort(keys)
    assert np.array_equal(keys[order], np.arange(300))
    assert np.array_equal(store.read(at[order]), newer)
    assert store.stats()["garbage_rows"] >= 1
    store.close()
