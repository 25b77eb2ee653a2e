# SPDX-License-Identifier: Apache-2.0
"""Rows on disks against the disk itself: ``python -m benchmarks ssd``.

Rows of 512 bytes in a `SegmentStore` of at least 200 segments, in a folder of the disk that
is measured. Cold reads: the page cache is dropped by ``posix_fadvise`` before
each, of segments and of what they are compared with; or they go past it. Each round measures both
sides, ratios are taken inside a round, and their median is reported. Every row read is compared
with the one written.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from benchmarks.report import Result, describe_machine, grid, machine, requirement, summary
from jaxsparse.store.ssd import SegmentStore
from jaxsparse.store.ssd.native import call
from jaxsparse.store.ssd.scattered import DEPTH as READER_DEPTH
from jaxsparse.store.ssd.segment import segment_name

ROW_BYTES = 512
SEGMENT_BYTES = 8 << 20
LEAST_SEGMENTS = 200
SCATTERED_ROWS = 8000
SHARES = (1.0, 0.5, 0.2, 0.1)
"""Of a segment's rows, read at random places."""
BLOCK, DISK_DEPTH = 4096, 64
"""Bytes of a read, and reads under way, by which the disk's own rate is told. The reader has more
under way (`scattered.DEPTH`)."""
MOST_CPU_US = 6
"""Of the CPU, for a row read at random."""
TABLE = "rows"
MODES = {"cached": "page cache dropped", "direct": "direct"}
"""How rows are read: through a page cache that has nothing of them, or past it."""


class Rows:
    """What is written: the number of a row mixed into random bytes, so that each is another."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.random = np.random.default_rng(0).integers(0, 2**63, ROW_BYTES // 8, np.int64)

    def of(self, numbers: np.ndarray) -> np.ndarray:
        return (self.random ^ numbers[:, None]).view(np.uint8)

    def check(self, got: np.ndarray, numbers: np.ndarray) -> None:
        if not np.array_equal(got, self.of(numbers)):
            raise AssertionError("rows are not what was written")


class Clock:
    """Seconds, and those of the CPU: threads and the kernel's workers included."""

    def __enter__(self) -> Clock:
        self._cpu, self._start = _cpu_s(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.s = time.perf_counter() - self._start
        self.cpu_s = _cpu_s() - self._cpu


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def drop_cache(paths: Sequence[pathlib.Path]) -> None:
    for path in paths:
        with opened(path) as descriptor:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def opened(path: pathlib.Path, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_store(folder: pathlib.Path, num_rows: int, direct: bool = False) -> SegmentStore:
    """Segments of 8 MB, or smaller ones where those would be too few."""
    most = num_rows * ROW_BYTES // (LEAST_SEGMENTS + 20)
    return SegmentStore(
        [folder],
        table=TABLE,
        row_bytes=ROW_BYTES,
        segment_bytes=max(3 * BLOCK, min(SEGMENT_BYTES, most)),
        direct=direct,
    )


def append_all(store: SegmentStore, rows: Rows) -> np.ndarray:
    """Locations, by row."""
    found = []
    for first in range(0, rows.num_rows, 1 << 15):
        numbers = np.arange(first, min(first + (1 << 15), rows.num_rows))
        found.append(store.append(numbers, rows.of(numbers)))
    store.flush()
    return np.concatenate(found)


def raw_write(folder: pathlib.Path, num_bytes: int) -> float:
    """Seconds of one file of as many bytes, 8 MB at a time, and its sync."""
    block = memoryview(np.random.default_rng(1).bytes(SEGMENT_BYTES))
    path = folder / "raw"
    with Clock() as clock, open(path, "wb", buffering=0) as file:
        for first in range(0, num_bytes, SEGMENT_BYTES):
            file.write(block[: num_bytes - first])
        os.fsync(file.fileno())
    path.unlink()
    return clock.s


def measure_append(folder: pathlib.Path, rows: Rows) -> Result:
    """The store's speed, and that of a file of the same size."""
    numbers = np.arange(rows.num_rows)
    data = rows.of(numbers)
    store = open_store(folder / "append", 1 << 40)
    with Clock() as clock:
        for first in range(0, rows.num_rows, 1 << 15):
            store.append(numbers[first : first + (1 << 15)], data[first : first + (1 << 15)])
        store.flush()
    store.close()
    for path in (folder / "append").iterdir():
        path.unlink()
    raw_s = raw_write(folder, data.nbytes)
    return {
        "store_gb_per_s": data.nbytes / clock.s / 1e9,
        "raw_gb_per_s": data.nbytes / raw_s / 1e9,
        "ratio": raw_s / clock.s,
        "cpu_us_per_row": clock.cpu_s / rows.num_rows * 1e6,
    }


def sequential_s(path: pathlib.Path, buffer: np.ndarray, direct: bool) -> float:
    """Seconds of a whole file into memory that is there."""
    with opened(path, os.O_DIRECT if direct else 0) as descriptor, Clock() as clock:
        at = 0
        while got := os.preadv(descriptor, [buffer[at : at + (1 << 20)]], at):
            at += got
    return clock.s


def measure_dense(
    store: SegmentStore, rows: Rows, at: np.ndarray, paths: list[pathlib.Path], seed: int
) -> Result:
    """A share of a segment's rows, against all of its file."""
    rng = np.random.default_rng(seed)
    path = paths[1 + seed % (len(paths) - 2)]
    mine = np.flatnonzero(at >> 24 == int(path.name.rpartition("-")[2]))
    buffer = aligned(path.stat().st_size + BLOCK)
    result = {}
    for share in SHARES:
        pick = np.sort(rng.choice(mine, max(16, int(share * mine.size)), replace=False))
        drop_cache([path])
        whole_s = sequential_s(path, buffer, store.direct)
        drop_cache([path])
        with Clock() as clock:
            got = store.read(at[pick])
        rows.check(got, pick)
        result[f"{share:g}"] = {
            "ms": clock.s * 1e3,
            "whole_ms": whole_s * 1e3,
            "ratio": whole_s / clock.s,
        }
    return result


def aligned(size: int) -> np.ndarray:
    """Memory that is there, as direct reads need it."""
    buffer = np.zeros(size + BLOCK, np.uint8)
    return buffer[-buffer.ctypes.data % BLOCK :][:size]


def measure_one_by_one(
    store: SegmentStore, rows: Rows, at: np.ndarray, paths: list[pathlib.Path], seed: int
) -> Result:
    """A tenth of a segment's rows, against one tensorstore read for each, all under way at once."""
    rng = np.random.default_rng(seed)
    path = paths[1 + seed % (len(paths) - 2)]
    number = int(path.name.rpartition("-")[2])
    mine = np.flatnonzero(at >> 24 == number)
    pick = rng.choice(mine, max(1, mine.size // 10), replace=False)
    begins = store._segments.all()[0].data_offset + (at[pick] & 0xFFFFFF) * ROW_BYTES
    context = ts.Context({"file_io_mode": {"mode": "direct" if store.direct else "default"}})
    spec = {"driver": "file", "path": f"{path.parent}/"}
    kvstore = ts.KvStore.open(spec, context=context).result()
    drop_cache([path])
    with Clock() as plain:
        reads = [
            kvstore.read(segment_name(number), byte_range=slice(begin, begin + ROW_BYTES))
            for begin in begins.tolist()
        ]
        single = b"".join(read.result().value for read in reads)
    rows.check(np.frombuffer(single, np.uint8).reshape(-1, ROW_BYTES), pick)
    drop_cache([path])
    with Clock() as clock:
        got = store.read(at[pick])
    rows.check(got, pick)
    return {"ms": clock.s * 1e3, "one_by_one_ms": plain.s * 1e3, "ratio": plain.s / clock.s}


def disk_rate(paths: list[pathlib.Path], seed: int) -> float | None:
    """Direct reads of 4 KiB a second, 64 under way, at random places of all files; None where
    there is no io_uring.

    Nothing is done with what is read. Ends are waited for 8 at a time, so that 57 to 64 are under
    way.
    """
    ring = call("jaxsparse_segment_reader", DISK_DEPTH)
    if not ring:
        return None
    rng = np.random.default_rng(seed)
    with contextlib.ExitStack() as stack:
        stack.callback(call, "jaxsparse_segment_reader_close", ring)
        files = np.array([stack.enter_context(opened(path, os.O_DIRECT)) for path in paths])
        blocks = np.array([path.stat().st_size // BLOCK for path in paths])
        chosen = rng.integers(0, len(paths), SCATTERED_ROWS)
        offsets = rng.integers(0, blocks[chosen]) * BLOCK
        with Clock() as clock:
            failed = call(
                "jaxsparse_segment_blocks", ring, len(chosen), files[chosen], offsets, BLOCK
            )
    if failed:
        raise OSError(failed, os.strerror(failed))
    return SCATTERED_ROWS / clock.s


def measure_scattered(
    store: SegmentStore, rows: Rows, at: np.ndarray, paths: list[pathlib.Path], seed: int
) -> Result:
    """Rows of all segments, against the disk's own rate."""
    pick = np.random.default_rng(seed).choice(rows.num_rows, SCATTERED_ROWS, replace=False)
    drop_cache(paths)
    with Clock() as clock:
        got = store.read(at[pick])
    rows.check(got, pick)
    rate = SCATTERED_ROWS / clock.s
    raw = disk_rate(paths, seed)
    return {
        "ms": clock.s * 1e3,
        "rows_per_s": rate,
        "cpu_us_per_row": clock.cpu_s / SCATTERED_ROWS * 1e6,
        "disk_reads_per_s": raw,
        "ratio": None if raw is None else rate / raw,
    }


def measure_reopen(folder: pathlib.Path, rows: Rows, paths: list[pathlib.Path]) -> Result:
    """Opening and all entries, cold."""
    drop_cache(paths)
    with Clock() as clock:
        store = open_store(folder, rows.num_rows)
        keys, _ = store.entries()
    store.close()
    if not np.array_equal(np.sort(keys), np.arange(rows.num_rows, dtype=np.uint64)):
        raise AssertionError("keys are not what was written")
    return {
        "s": clock.s,
        "s_per_gb_of_rows": clock.s / (rows.num_rows * ROW_BYTES / 1e9),
        "index_bytes": rows.num_rows * 12,
    }


def medians(rounds: list[Any]) -> Any:
    """Of nested results, number by number."""
    if isinstance(rounds[0], dict):
        return {key: medians([one[key] for one in rounds]) for key in rounds[0]}
    return None if rounds[0] is None else statistics.median(rounds)


def measure(
    folder: pathlib.Path | None = None, *, num_rows: int = 3_400_000, rounds: int = 5
) -> Result:
    """All of it.

    Args:
        folder: of the disk; None is that of temporary files.
        num_rows: in the store; 3.4 million make 1.7 GB.
        rounds: of each comparison.
    """
    rows = Rows(num_rows)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        folder = pathlib.Path(temporary)
        appends = [measure_append(folder, Rows(max(1, num_rows // 8))) for _ in range(rounds)]
        store = open_store(folder / "rows", num_rows)
        at = append_all(store, rows)
        store.close()
        paths = sorted((folder / "rows").glob("segment-*"))
        told: Result = {"append": appends}
        for name in MODES:
            store = open_store(folder / "rows", num_rows, direct=name == "direct")
            for kind in ("dense", "scattered", "one_by_one"):
                told[f"{kind}_{name}"] = []
            for seed in range(rounds):
                args = store, rows, at, paths, seed
                told[f"dense_{name}"].append(measure_dense(*args))
                told[f"scattered_{name}"].append(measure_scattered(*args))
                told[f"one_by_one_{name}"].append(measure_one_by_one(*args))
            implementation = store.implementation
            store.close()
        told["reopen"] = [measure_reopen(folder / "rows", rows, paths) for _ in range(rounds)]
    median = {name: medians(values) for name, values in told.items()}
    return {
        "benchmark": "ssd",
        "machine": machine(),
        "implementation": implementation,
        "reads_under_way": {"reader": READER_DEPTH, "disk": DISK_DEPTH},
        "num_rows": num_rows,
        "row_bytes": ROW_BYTES,
        "segments": len(paths),
        "median": median,
        "rounds": told,
        "requirements": requirements(median, implementation),
    }


def requirements(median: Result, implementation: str) -> list[Result]:
    """What the figures must reach; the disk's own rate only where it can be measured."""
    found = [requirement("append, share of raw write speed", median["append"]["ratio"], 0.8)]
    for share, told in median["dense_cached"].items():
        what = f"whole segment's time / that of {float(share):.0%} of its rows"
        found.append(requirement(what, told["ratio"], 0.6))
    one = median["one_by_one_direct"]["ratio"]
    found.append(requirement("10 % of a segment, times one read a row, direct", one, 4))
    for mode, how in MODES.items() if implementation == "io_uring" else ():
        told = median[f"scattered_{mode}"]
        what = f"8,000 rows, {how}: share of the disk's rate at QD{DISK_DEPTH}"
        found.append(requirement(what, told["ratio"], 0.7))
        what = f"8,000 rows, {how}: CPU microseconds a row"
        found.append(requirement(what, told["cpu_us_per_row"], MOST_CPU_US, at_least=False))
    return found


def table(result: Result) -> str:
    """The result for people."""
    median = result["median"]
    lines = [["", "store", "disk", "ratio"]]
    append = median["append"]
    lines.append(
        [
            "append, GB/s",
            f"{append['store_gb_per_s']:.2f}",
            f"{append['raw_gb_per_s']:.2f}",
            f"{append['ratio']:.2f}",
        ]
    )
    for name in MODES:
        for share, told in median[f"dense_{name}"].items():
            what = f"{float(share):.0%} of a segment, {name}, ms"
            figures = told["ms"], told["whole_ms"], told["ratio"]
            lines.append([what, *(f"{figure:.2f}" for figure in figures)])
        told = median[f"scattered_{name}"]
        figures = told["rows_per_s"], told["disk_reads_per_s"]
        rates = [f"{figure:,.0f}" if figure else "" for figure in figures]
        ratio = "" if told["ratio"] is None else f"{told['ratio']:.2f}"
        lines.append([f"scattered, {name}, rows/s", *rates, ratio])
        lines.append([f"scattered, {name}, CPU us/row", f"{told['cpu_us_per_row']:.1f}", "", ""])
        one = median[f"one_by_one_{name}"]
        figures = one["ms"], one["one_by_one_ms"], one["ratio"]
        what = f"10 % and one read a row, {name}, ms"
        lines.append([what, *(f"{figure:.2f}" for figure in figures)])
    reopen = median["reopen"]
    lines.append(["reopen, s per GB of rows", f"{reopen['s_per_gb_of_rows']:.2f}", "", ""])
    depth = result["reads_under_way"]
    head = (
        f"{describe_machine(result)}\n{result['num_rows']:,} rows of {result['row_bytes']} bytes, "
        f"{result['segments']} segments; reader: {result['implementation']}, "
        f"{depth['reader']} reads under way; the disk's own rate: {depth['disk']} of {BLOCK} bytes"
    )
    return f"{head}\n{grid(lines)}\n{summary(result['requirements'])}"
