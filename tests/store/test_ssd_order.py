# SPDX-License-Identifier: Apache-2.0
"""The order of system calls: a process that is killed cannot show a sync that is missing."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest

from jaxsparse.store.ssd import journal
from tests.store.ssd_rows import open_store, random_rows

Call = tuple[str, str]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> list[Call]:
    """What the process really calls, with the files' names below the folder."""
    seen: list[Call] = []
    real_sync, real_rename, real_unlink = os.fsync, os.rename, os.unlink

    def name(path: object) -> str:
        return str(pathlib.Path(str(path)).relative_to(tmp_path))

    def fsync(descriptor: int) -> None:
        path = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if "segment-" in path.name:  # whole, and under its name
            assert path.stat().st_size % 4096 == 0 and path.stat().st_size > 4096
            assert path.read_bytes()[:8] == b"jaxsseg1"
        real_sync(descriptor)
        seen.append(("fsync", name(path)))

    def rename(old: object, new: object) -> None:
        seen.append(("rename", name(new)))
        real_rename(old, new)

    def unlink(path: object) -> None:
        seen.append(("unlink", name(path)))
        real_unlink(path)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "unlink", unlink)
    return seen


COMMIT = [
    ("fsync", "disk0/log-000001"),
    ("fsync", "disk0/manifest.json.tmp"),
    ("rename", "disk0/manifest.json"),
    ("fsync", "disk0"),
]


def test_the_order_of_a_flush(tmp_path: pathlib.Path, calls: list[Call]) -> None:
    store = open_store(tmp_path)
    at = store.append(np.arange(600, dtype=np.uint64), random_rows(np.random.default_rng(0), 600))
    del calls[:]
    store.flush()
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("disk*/segment-*")}
    assert len(names) == 5
    # Those that were full were written behind, before the flush or in it.
    data, rest = calls[:-6], calls[-6:]
    assert {kind for kind, _ in data} == {"fsync"} and {path for _, path in data} <= names
    assert rest == [("fsync", "disk0"), ("fsync", "disk1"), *COMMIT]

    del calls[:]
    store.flush()
    assert calls == []  # nothing to do
    store.release(at[:5])
    store.flush()
    assert calls == COMMIT
    store.close()


def test_every_segment_is_synced_before_the_folders(
    tmp_path: pathlib.Path, calls: list[Call]
) -> None:
    store = open_store(tmp_path)
    del calls[:]
    store.append(np.arange(3000, dtype=np.uint64), random_rows(np.random.default_rng(0), 3000))
    store.flush()
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("disk*/segment-*")}
    folders = min(calls.index(("fsync", "disk0")), calls.index(("fsync", "disk1")))
    assert {path for _, path in calls[:folders]} == names
    assert calls[folders:] == [("fsync", "disk0"), ("fsync", "disk1"), *COMMIT]
    store.close()


def test_segments_are_deleted_after_the_manifest(tmp_path: pathlib.Path, calls: list[Call]) -> None:
    store = open_store(tmp_path)
    at = store.append(np.arange(3000, dtype=np.uint64), random_rows(np.random.default_rng(0), 3000))
    store.release(at[::2])
    store.flush()
    del calls[:]
    store.compact(0.3)
    unlinks = [index for index, (kind, _) in enumerate(calls) if kind == "unlink"]
    assert len(unlinks) > 5 and unlinks == list(range(unlinks[0], len(calls)))
    assert calls[unlinks[0] - 4 : unlinks[0]] == COMMIT
    assert all("segment-" in calls[index][1] for index in unlinks)
    store.close()


def test_the_order_of_a_new_log(
    tmp_path: pathlib.Path, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    monkeypatch.setattr(journal, "TAIL_BYTES", 50)
    for number in range(3):
        store.append(np.full(5, number, np.uint64), random_rows(np.random.default_rng(0), 5))
        del calls[:]
        store.flush()
    assert calls[-7:] == [
        ("fsync", "disk0/log-000002.tmp"),
        ("rename", "disk0/log-000002"),
        ("fsync", "disk0"),
        ("fsync", "disk0/manifest.json.tmp"),
        ("rename", "disk0/manifest.json"),
        ("fsync", "disk0"),
        ("unlink", "disk0/log-000001"),
    ]
    store.close()


def test_the_order_in_which_a_store_is_made(tmp_path: pathlib.Path, calls: list[Call]) -> None:
    open_store(tmp_path).close()
    assert [call for call in calls if call[0] == "rename"] == [
        ("rename", "disk1/folder.json"),
        ("rename", "disk0/folder.json"),
        ("rename", "disk0/log-000001"),
        ("rename", "disk0/manifest.json"),
    ]
