# SPDX-License-Identifier: Apache-2.0
"""Rows come back as they went in: every reader, every size, checksums by their definition."""

from __future__ import annotations

import os
import pathlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxsparse.ops.native import library
from jaxsparse.store.ssd import SegmentStore, UnknownLocationError, layout, scattered
from jaxsparse.store.ssd.checksums import crc32c, row_checksums
from jaxsparse.store.ssd.native import call
from tests.store.ssd_rows import (
    IMPLEMENTATIONS,
    NATIVE,
    ROW_BYTES,
    crc32c_by_bits,
    open_store,
    random_rows,
)

native_only = pytest.mark.skipif(not NATIVE, reason=f"no native library: {library.why_not()}")


def readers() -> list[str]:
    """Those that run here; a container may forbid io_uring."""
    found = [name for name in IMPLEMENTATIONS if name == "python" or NATIVE]
    if NATIVE and not scattered._open_rings():
        found.remove("io_uring")
    return found


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 8, 9, 31, 44, 512, 513, 1500])
@pytest.mark.parametrize("native", [pytest.param(True, marks=native_only), False])
def test_checksums(size: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(library, "_loaded", lambda: "left out")
    rng = np.random.default_rng(size)
    rows, locations = random_rows(rng, 3, size), rng.integers(0, 2**62, 3)
    want = [
        crc32c_by_bits(row.tobytes() + int(at).to_bytes(8, "little"))
        for row, at in zip(rows, locations, strict=True)
    ]
    assert row_checksums(rows, locations).tolist() == want
    data = rows.tobytes()
    assert crc32c(data) == crc32c_by_bits(data)


@native_only
def test_the_table_and_the_instruction_agree() -> None:
    data = np.random.default_rng(0).integers(0, 256, 1001, np.uint8)
    for size in (0, 1, 8, 15, 1001):
        part = np.ascontiguousarray(data[:size])
        by_table = call("jaxsparse_crc32c", part, size, 1)
        assert by_table == call("jaxsparse_crc32c", part, size, 0) == crc32c_by_bits(bytes(part))


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("row_bytes", [1, 44, 512, 5000])
@pytest.mark.parametrize("implementation", readers())
def test_every_reader_gives_what_was_written(
    tmp_path: pathlib.Path, implementation: str, row_bytes: int, direct: bool
) -> None:
    rng = np.random.default_rng(row_bytes)
    segment_bytes = 100_000
    count = 3 * layout.rows_per_segment(segment_bytes, row_bytes) + 5
    rows = random_rows(rng, count, row_bytes)
    options = {"row_bytes": row_bytes, "segment_bytes": segment_bytes, "direct": direct}
    store = open_store(tmp_path, **options, implementation=implementation)
    assert store.implementation == implementation
    at = store.append(np.arange(count, dtype=np.int64), rows)
    assert store.stats()["scattered_rows"] + store.stats()["dense_rows"] == 0
    store.flush()
    picks = [np.arange(count), rng.integers(0, count, 3), np.array([count - 1, 0, 0])]
    picks += [rng.permutation(count), np.arange(0, count, max(1, count // 25))]
    for pick in picks:
        assert np.array_equal(store.read(at[pick]), rows[pick])
        assert np.array_equal(store.read_ahead(at[pick]).result(), rows[pick])
    assert store.read(at[:0]).shape == (0, row_bytes)
    told = store.stats()
    assert told["implementation"] == implementation
    assert told["scattered_rows"] > 0 and told["dense_rows"] > 0
    store.close()


@native_only
def test_where_io_uring_is_forbidden_threads_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scattered, "_open_rings", list)
    store = open_store(tmp_path)
    assert store.implementation == "pread"
    store.close()
    with pytest.raises(RuntimeError, match="io_uring is not to be had: the kernel or a container"):
        open_store(tmp_path, implementation="io_uring")


def test_without_a_native_library_python_reads(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    store = open_store(tmp_path)
    rows = random_rows(rng, 2000)
    at = store.append(np.arange(2000, dtype=np.uint64), rows)
    store.close()
    monkeypatch.setattr(library, "_loaded", lambda: "left out")
    store = open_store(tmp_path)
    assert store.implementation == "python"
    assert np.array_equal(store.read(at), rows) and np.array_equal(store.read(at[5:6]), rows[5:6])
    store.close()


def test_files_are_spread_over_the_folders_and_not_larger_than_said(tmp_path: pathlib.Path) -> None:
    store = open_store(tmp_path, folders=3)
    rows = random_rows(np.random.default_rng(0), 3000)
    store.append(np.arange(3000, dtype=np.uint64), rows)
    store.close()
    counts = [len(list(tmp_path.glob(f"disk{n}/segment-*"))) for n in range(3)]
    assert min(counts) >= 3 and max(counts) - min(counts) <= 1
    for path in tmp_path.glob("disk*/segment-*"):
        assert path.stat().st_size <= 16 << 10 and path.stat().st_size % 4096 == 0


def test_the_file_is_as_described(tmp_path: pathlib.Path) -> None:
    """Read with numpy alone."""
    store = open_store(tmp_path, folders=1)
    rng = np.random.default_rng(0)
    keys, rows = rng.integers(0, 2**63, 7).astype(np.uint64), random_rows(rng, 7)
    at = store.append(keys, rows)
    store.close()
    (path,) = tmp_path.glob("disk0/segment-*")
    data = path.read_bytes()
    assert data[:8] == b"jaxsseg1"
    assert np.array_equal(np.frombuffer(data, "<u8", 7, 64), keys)
    crcs = np.frombuffer(data, "<u4", 7, 64 + 56).tolist()
    places = [int(one).to_bytes(8, "little") for one in at]
    want = [crc32c_by_bits(r.tobytes() + place) for r, place in zip(rows, places, strict=True)]
    assert crcs == want
    assert data[4096 : 4096 + rows.size] == rows.tobytes()


def test_unknown_locations(tmp_path: pathlib.Path) -> None:
    store = open_store(tmp_path)
    at = store.append(np.arange(3, dtype=np.uint64), random_rows(np.random.default_rng(0), 3))
    for wrong in (at[-1] + 1, 1 << 40, -1):
        with pytest.raises(
            UnknownLocationError, match=r"table 'item': location .* never given out"
        ):
            store.read(np.array([at[0], wrong]))
    with pytest.raises(UnknownLocationError, match="is released twice in one call"):
        store.release(at[[0, 0]])
    store.release(at[:1])
    with pytest.raises(UnknownLocationError, match="was released, maybe before a compaction"):
        store.read(at)
    with pytest.raises(UnknownLocationError, match="was released"):
        store.release(at)
    store.read(at[1:])
    assert store.stats()["garbage_rows"] == 1
    store.close()


@pytest.mark.parametrize(
    ("call_it", "text"),
    [
        (
            lambda s: s.append(np.zeros(2), np.zeros((2, ROW_BYTES), np.uint8)),
            r"keys must be \[n\]",
        ),
        (lambda s: s.append(np.zeros(2, np.int64), np.zeros((2, 3), np.uint8)), r"\[2, 44\] uint8"),
        (lambda s: s.read(np.zeros(2)), r"locations must be \[n\] int64, got \[2\] float64"),
        (lambda s: s.compact(1.0), "max_garbage must be at least 0 and below 1, got 1.0"),
    ],
)
def test_wrong_arguments(tmp_path: pathlib.Path, call_it, text: str) -> None:
    store = open_store(tmp_path)
    with pytest.raises(ValueError, match=text):
        call_it(store)
    store.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"row_bytes": 0}, "row_bytes must be at least 1, got 0"),
        ({"segment_bytes": 100}, "segment_bytes must be at least 4096, got 100"),
        ({"folders": 0}, "folders must be different ones, at least one"),
    ],
)
def test_wrong_sizes(tmp_path: pathlib.Path, options, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        open_store(tmp_path, **options)


def test_direct_reads_where_there_are_none(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ValueError, match=r"direct=True, but the file system of .* has no direct"):
        open_store(tmp_path, direct=True)


def test_a_closed_store_says_so(tmp_path: pathlib.Path) -> None:
    store = open_store(tmp_path)
    store.close()
    store.close()
    with pytest.raises(RuntimeError, match="table 'item': the store is closed"):
        store.entries()


def test_few_files_are_kept_open(tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    store = open_store(tmp_path)
    rows = random_rows(rng, 9000)
    at = store.append(np.arange(9000, dtype=np.uint64), rows)
    store.flush()
    store._rows.open_files._most = 5
    pick = np.arange(0, 9000, 45)
    assert np.array_equal(store.read(at[pick]), rows[pick])
    assert store.stats()["dense_rows"] == 0 and len(store._rows.open_files._files) == 5
    store.close()


def test_many_threads_append_read_and_release(tmp_path: pathlib.Path) -> None:
    """While one flushes; each thread's rows are its own."""
    store = open_store(tmp_path)
    begin = threading.Barrier(5)
    end = threading.Event()

    def work(seed: int) -> int:
        begin.wait()
        rng = np.random.default_rng(seed)
        for _ in range(20):
            rows = random_rows(rng, 500)
            at = store.append(np.arange(500, dtype=np.uint64) + 1000 * seed, rows)
            ahead = store.read_ahead(at[::3])
            assert np.array_equal(store.read(at), rows)
            store.release(at)
            assert np.array_equal(ahead.result(), rows[::3])
        return 20 * 500

    def flush() -> int:
        begin.wait()
        count = 0
        while not end.is_set():
            store.flush()
            count += 1
        return count

    with ThreadPoolExecutor(5) as threads:
        flushing = threads.submit(flush)
        done = [threads.submit(work, seed) for seed in range(4)]
        assert sum(one.result() for one in done) == 40_000
        end.set()
        assert flushing.result() > 0
    assert store.stats()["live_rows"] == 0 and store.stats()["garbage_rows"] == 40_000
    store.flush()
    store.compact()
    assert store.stats()["segments"] == 0
    assert not list(tmp_path.glob("disk*/segment-*"))
    store.close()


def test_no_reader_is_left_behind(tmp_path: pathlib.Path) -> None:
    """Reads that were asked for before a compaction get their rows."""
    rng = np.random.default_rng(0)
    store: SegmentStore = open_store(tmp_path)
    rows = random_rows(rng, 3000)
    at = store.append(np.arange(3000, dtype=np.uint64), rows)
    store.release(at[::2])
    store.flush()
    ahead = [store.read_ahead(at[1::2]) for _ in range(6)]
    old, new = store.compact(0.4)
    assert np.array_equal(np.sort(old), at[1::2])
    for one in ahead:
        assert np.array_equal(one.result(), rows[1::2])
    with pytest.raises(UnknownLocationError, match="before a compaction; use what `append`"):
        store.read(old)
    assert np.array_equal(store.read(new), rows[1::2][np.argsort(np.argsort(old))])
    store.close()
