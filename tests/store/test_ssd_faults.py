# SPDX-License-Identifier: Apache-2.0
"""Damage, full disks and second users: said clearly, never zeros, nothing lost (cases E15, E17)."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxsparse.store.ssd import (
    DamagedJournalError,
    DamagedSegmentError,
    LockedError,
    MismatchError,
    NoSpaceError,
    StoreError,
    UncertainError,
)
from tests.store.ssd_rows import ROW_BYTES, open_store, random_rows
from tests.store.test_ssd_rows import readers

ROOT = pathlib.Path(__file__).resolve().parents[2]
COUNT = 600


def filled(folder: pathlib.Path, **options) -> tuple[np.ndarray, np.ndarray]:
    """A closed store's locations and rows; five segments."""
    store = open_store(folder, **options)
    rows = random_rows(np.random.default_rng(0), COUNT)
    at = store.append(np.arange(COUNT, dtype=np.uint64), rows)
    store.close()
    return at, rows


def segment_files(folder: pathlib.Path) -> list[pathlib.Path]:
    found = sorted(folder.glob("disk*/segment-*"), key=lambda path: path.name)
    assert len(found) == 5
    return found


def flip(path: pathlib.Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("implementation", readers())
def test_a_flipped_byte_of_a_row(tmp_path: pathlib.Path, implementation: str, direct: bool) -> None:
    at, rows = filled(tmp_path)
    path = segment_files(tmp_path)[0]
    flip(path, 4096 + 20 * ROW_BYTES + 7)
    store = open_store(tmp_path, implementation=implementation, direct=direct)
    text = (
        rf"table 'item': segment 1 in {re.escape(str(path.parent))} cannot be read \({path.name}: "
        r"the checksum of row 20 differs\); put back a copy of the file, or remove"
    )
    for pick in (np.arange(COUNT), np.array([20]), np.array([400, 20])):
        with pytest.raises(DamagedSegmentError, match=text):
            store.read(at[pick])
    with pytest.raises(DamagedSegmentError, match=text):
        store.read_ahead(at).result()
    others = np.delete(np.arange(COUNT), 20)
    assert np.array_equal(store.read(at[others]), rows[others])
    store.close()


@pytest.mark.parametrize("implementation", readers())
def test_a_segment_cut_or_deleted_under_an_open_store(
    tmp_path: pathlib.Path, implementation: str
) -> None:
    at, _ = filled(tmp_path)
    path = segment_files(tmp_path)[0]
    store = open_store(tmp_path, implementation=implementation)
    os.truncate(path, 5000)
    with pytest.raises(DamagedSegmentError, match=f"table 'item': segment 1 in .*{path.name}"):
        store.read(at[:300])
    with pytest.raises(DamagedSegmentError, match=r"segment 1 in .*it ends before row 120"):
        store.read(at[[120]])
    path.unlink()
    with pytest.raises(DamagedSegmentError, match=r"segment 1 in .*it is missing"):
        store.read(at[:300])
    store.close()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (pathlib.Path.unlink, "No such file or directory"),
        (lambda path: os.truncate(path, 8192), r"it has 8192 bytes, not \d+"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "checksum of its header and"),
        (lambda path: flip(path, 70), "the checksum of its header and keys differs"),
        (lambda path: flip(path, 9), "the checksum of its header and keys differs"),
    ],
)
def test_a_damaged_segment_is_found_when_opening(tmp_path: pathlib.Path, damage, text) -> None:
    filled(tmp_path)
    path = segment_files(tmp_path)[1]
    whole = path.read_bytes()
    damage(path)
    with pytest.raises(DamagedSegmentError, match=rf"table 'item': segment 2 in .*{text}"):
        open_store(tmp_path)
    path.write_bytes(whole)
    open_store(tmp_path).close()


def test_a_segment_in_the_place_of_another(tmp_path: pathlib.Path) -> None:
    filled(tmp_path)
    first, second, *_ = segment_files(tmp_path)
    second.write_bytes(first.read_bytes())
    with pytest.raises(DamagedSegmentError, match=r"segment 2 in .*it is another segment's file"):
        open_store(tmp_path)


def test_a_damaged_journal(tmp_path: pathlib.Path) -> None:
    filled(tmp_path)
    manifest, log = tmp_path / "disk0/manifest.json", tmp_path / "disk0/log-000001"
    for path, change, text in (
        (manifest, lambda: manifest.write_text("{"), r"manifest.json is damaged \("),
        (manifest, lambda: flip(manifest, 13), "manifest.json is damaged"),
        (manifest, manifest.unlink, "it is missing, but there are segments"),
        (log, lambda: flip(log, 20), "the checksum of its record at byte 0 differs"),
        (log, lambda: os.truncate(log, 30), "it has 30 bytes, not"),
        (log, log.unlink, "it has 0 bytes, not"),
    ):
        whole = path.read_bytes()
        change()
        with pytest.raises(DamagedJournalError, match=text):
            open_store(tmp_path)
        path.write_bytes(whole)
    open_store(tmp_path).close()


def test_what_a_store_is_opened_as(tmp_path: pathlib.Path) -> None:
    filled(tmp_path)
    with pytest.raises(MismatchError, match=r"holds table 'item' with rows of 44 bytes, not table"):
        open_store(tmp_path, row_bytes=48)
    with pytest.raises(MismatchError, match="not table 'user' with rows of 44; give this table"):
        open_store(tmp_path, table="user")
    with pytest.raises(MismatchError, match="disk0 is not folder 0 of 1 of the store"):
        open_store(tmp_path, folders=1)
    with pytest.raises(MismatchError, match=r"disk0 is not folder 0 of 3 .* in the same order"):
        open_store(tmp_path, folders=3)
    mark = tmp_path / "disk1/folder.json"
    whole = mark.read_text()
    mark.write_text(json.dumps({"store": "x"}))
    with pytest.raises(MismatchError, match=r"folder.json is damaged"):
        open_store(tmp_path)
    mark.write_text(whole)
    open_store(tmp_path, segment_bytes=32 << 10).close()


HOLD = """
import pathlib, sys
from tests.store.ssd_rows import open_store
store = open_store(pathlib.Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_and_a_killed_one_is_not_in_the_way(
    tmp_path: pathlib.Path,
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == "open\n"
    text = f"table 'item': process {holder.pid} has the store in .*disk0 open; end it, or give"
    for _ in range(2):
        with pytest.raises(LockedError, match=text):
            open_store(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    assert (tmp_path / "disk0/lock").read_text() == str(holder.pid)
    store = open_store(tmp_path)
    with pytest.raises(LockedError, match=f"process {os.getpid()} has the store"):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond it; Python ignores the signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def append_until_full(store, rng) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What was taken; ends with the error of a full disk."""
    rows, at = [], []
    for number in range(200):
        more = random_rows(rng, 100)
        try:
            at.append(store.append(np.arange(100, dtype=np.uint64) + 100 * (number + 10), more))
        except NoSpaceError as error:
            assert re.search(r"table 'item': no space to write .*segment-0", str(error))
            assert "nothing appended is lost" in str(error)
            return rows, at
        rows.append(more)
    pytest.fail("the disk is never full")


def test_a_full_disk(tmp_path: pathlib.Path) -> None:
    old_at, old_rows = filled(tmp_path)
    store = open_store(tmp_path, segment_bytes=64 << 10)
    rng = np.random.default_rng(1)
    with file_limit(20 << 10):
        rows, at = append_until_full(store, rng)
        with pytest.raises(NoSpaceError, match=r"no space to write .*segment-.*File too large"):
            store.flush()
        with pytest.raises(NoSpaceError):
            store.append(np.zeros(1, np.uint64), rows[0][:1])
        # What RAM holds and what the disk holds can both be read.
        assert np.array_equal(store.read(np.concatenate(at)), np.concatenate(rows))
        assert np.array_equal(store.read(old_at), old_rows)
        assert all(path.stat().st_size < 20 << 10 for path in tmp_path.glob("disk*/segment-*"))
    store.flush()  # there is room again
    store.close()
    store = open_store(tmp_path)
    assert np.array_equal(store.read(np.concatenate(at)), np.concatenate(rows))
    assert np.array_equal(store.read(old_at), old_rows)
    # Not those of appends that were refused.
    assert len(store.entries()[0]) == COUNT + 100 * len(rows) == store.stats()["live_rows"]
    store.close()


def test_a_full_disk_when_the_store_is_closed(tmp_path: pathlib.Path) -> None:
    old_at, old_rows = filled(tmp_path)
    store = open_store(tmp_path, segment_bytes=64 << 10)
    with file_limit(20 << 10):
        append_until_full(store, np.random.default_rng(1))
        with pytest.raises(NoSpaceError):
            store.close()
        store = open_store(tmp_path)
        assert np.array_equal(store.read(old_at), old_rows)
        store.close()


def test_a_full_disk_while_the_log_is_written(tmp_path: pathlib.Path) -> None:
    store = open_store(tmp_path, segment_bytes=8 << 20)
    rows = random_rows(np.random.default_rng(0), 4000)
    at = store.append(np.arange(4000, dtype=np.uint64), rows)
    store.flush()
    store.release(at[:3000])
    with file_limit(16 << 10):
        for _ in range(2):
            with pytest.raises(NoSpaceError, match=r"no space to write .*log-000001"):
                store.flush()
    assert np.array_equal(store.read(at[3000:]), rows[3000:])
    store.flush()
    store.close()
    store = open_store(tmp_path)
    keys, _ = store.entries()
    assert np.array_equal(np.sort(keys), np.arange(3000, 4000))
    store.close()


def test_a_full_disk_while_compacting_moves_nothing(tmp_path: pathlib.Path) -> None:
    store = open_store(tmp_path, segment_bytes=64 << 10)
    rows = random_rows(np.random.default_rng(0), 5000)
    at = store.append(np.arange(5000, dtype=np.uint64), rows)
    store.release(at[::2])
    store.flush()
    files = set(tmp_path.glob("disk*/segment-*"))
    with file_limit(20 << 10), pytest.raises(NoSpaceError):
        store.compact(0.3)
    assert set(tmp_path.glob("disk*/segment-*")) == files
    assert np.array_equal(store.read(at[1::2]), rows[1::2])
    old, _ = store.compact(0.3)
    assert len(old) == 2500
    store.close()


def test_a_disk_that_fails_otherwise(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    rows = random_rows(np.random.default_rng(0), 5)
    at = store.append(np.arange(5, dtype=np.uint64), rows)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StoreError, match=r"segment 1 cannot be written to .*Input/output"):
            store.flush()
    assert np.array_equal(store.read(at), rows)
    store.close()


def test_a_full_disk_can_be_opened_and_read(tmp_path: pathlib.Path) -> None:
    at, rows = filled(tmp_path)
    with file_limit(0):
        store = open_store(tmp_path)
        assert np.array_equal(store.read(at), rows)
        store.close()


def test_a_store_without_its_marks(tmp_path: pathlib.Path) -> None:
    filled(tmp_path)
    for path in tmp_path.glob("disk*/folder.json"):
        path.unlink()
    with pytest.raises(MismatchError, match=r"disk0 holds a store, but its folder.json is missing"):
        open_store(tmp_path)


@pytest.mark.parametrize("compact", [False, True])
def test_a_rename_that_may_not_be_on_the_disk(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, compact: bool
) -> None:
    """Nothing is deleted or written over any more; opening again finds out what there is."""
    store = open_store(tmp_path, folders=1)
    rows = random_rows(np.random.default_rng(0), COUNT)
    at = store.append(np.arange(COUNT, dtype=np.uint64), rows)
    store.flush()
    store.release(at[::2])
    if compact:
        store.flush()
    real, names = os.fsync, []

    def fail(descriptor: int) -> None:
        names.append(pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        if names[-2:] == ["manifest.json.tmp", "disk0"]:
            raise OSError(5, "Input/output error")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(UncertainError, match=r"manifest.json was written, but its"):
            store.compact(0.3) if compact else store.flush()
    assert np.array_equal(store.read(at[1::2]), rows[1::2])
    store.append(np.array([9999], np.uint64), rows[:1])
    with pytest.raises(UncertainError, match=r"an earlier commit failed.*close the store and open"):
        store.flush()
    with pytest.raises(UncertainError):
        store.close()
    store = open_store(tmp_path, folders=1)
    keys, at = store.entries()
    assert np.array_equal(np.sort(keys), np.arange(1, COUNT, 2))
    assert np.array_equal(store.read(at), rows[keys.astype(np.int64)])
    store.close()


def test_a_flush_beside_a_second_attempt(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush counts no segment that an append is just writing again."""
    store = open_store(tmp_path, folders=1)
    rows = random_rows(np.random.default_rng(0), COUNT)
    real = store._files.write
    failing = [True]

    def write(segment) -> None:
        if failing[0]:
            raise NoSpaceError("full")
        time.sleep(0.02)
        real(segment)

    monkeypatch.setattr(store._writes, "_write", write)
    store.append(np.arange(100, dtype=np.uint64), rows[:100])
    with pytest.raises(NoSpaceError):
        store.flush()
    failing[0] = False
    with ThreadPoolExecutor(2) as threads:
        more = threads.submit(store.append, np.arange(100, COUNT, dtype=np.uint64), rows[100:])
        store.flush()
        on_disk = {path.name for path in tmp_path.glob("disk0/segment-*")}
        more.result()
    assert "segment-000000000001" in on_disk
    store.close()
