# SPDX-License-Identifier: Apache-2.0
"""A store of 10 GB on a disk: written at once, trained on for some passes, closed and reopened."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import tempfile
import time

import numpy as np

from benchmarks.report import Result, requirement
from benchmarks.ssd import drop_cache
from benchmarks.tier_task import TABLE, TierTask, TierWorkload
from jaxsparse.store.capacity import plan_host
from jaxsparse.store.index import KeyIndex
from jaxsparse.store.ssd import SegmentStore

LEAST_ROW_BYTES = 10e9
"""Of the rows on the disk."""
REOPEN_S, REOPEN_S_PER_GB = 5.0, 1.0
"""Seconds to reopen: these, and these for each GB of the index."""
ROWS_AT_A_TIME = 1 << 18
GARBAGE_SHARE = 1.1
"""Bytes on the disk over those of the rows: passes take some rows away and write them again."""


WRITTEN = TierWorkload(
    tier="ssd", rows=22_500_000, num_keys=22_500_000, slab_share=1 / 50, ram_share=1 / 50
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargeStore:
    """What is written, and how it is trained on."""

    workload: TierWorkload = WRITTEN
    """Every key of the log has a row."""
    passes: int = 10

    @property
    def disk_bytes(self) -> int:
        """That have to be free."""
        planned = plan_host(self.workload.table())
        return round(GARBAGE_SHARE * self.workload.rows * (planned.row_bytes + 20))


def measure_large(large: LargeStore, folder: pathlib.Path | None) -> Result:
    """Seconds of each part; or why it was left out."""
    with tempfile.TemporaryDirectory(dir=folder) as below:
        free = shutil.disk_usage(below).free
        if free < large.disk_bytes:
            return {
                "left_out": f"a store of {large.workload.rows:,} rows takes "
                f"{large.disk_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
            }
        return _measure(large, below)


def _measure(large: LargeStore, folder: str) -> Result:
    workload = large.workload
    task = TierTask(workload, folder)
    start = time.perf_counter()
    keys = workload.log.keys(np.arange(1, workload.rows + 1))
    rng = np.random.default_rng(0)
    for first in range(0, keys.size, ROWS_AT_A_TIME):
        some = keys[first : first + ROWS_AT_A_TIME]
        task.write(some, rng.standard_normal((some.size, workload.dim), np.float32))
    task.flush()
    written = time.perf_counter()
    task.step(0)
    trained = time.perf_counter()
    for number in range(1, 1 + large.passes):
        task.step(number)
    trained_s = time.perf_counter() - trained
    told = task.memory()
    sample = keys[:: max(1, keys.size // 1000)]
    expected = task.read(sample)
    task.flush()
    task.close()
    files = pathlib.Path(task.table.tiers.ssd[0]) / TABLE  # type: ignore[union-attr]
    return {
        "rows": told["size"],
        "ssd_rows": told["ssd_rows"],
        "row_bytes": (row_bytes := plan_host(task.table).row_bytes),
        "write_s": written - start,
        "passes": large.passes,
        "samples_per_s": large.passes * workload.batches_per_pass * workload.batch / trained_s,
        "pass": told["pass"],
        "reopen": _reopen(files, row_bytes, told["ssd_rows"], sample, expected, workload.dim),
    }


def _reopen(
    files: pathlib.Path,
    row_bytes: int,
    num_rows: int,
    sample: np.ndarray,
    expected: np.ndarray,
    dim: int,
) -> Result:
    """Cold: the disk's index, then all keys of it in a key index; some rows are compared."""
    drop_cache([path for path in files.iterdir() if path.is_file()])
    start = time.perf_counter()
    store = SegmentStore([files], table=TABLE, row_bytes=row_bytes)
    keys, locations = store.entries()
    opened = time.perf_counter()
    index = KeyIndex(max(1, keys.size))
    index.insert(keys)
    ended = time.perf_counter()
    index_bytes = keys.nbytes + locations.nbytes + index.nbytes
    found = index.find(sample)
    on_disk = found >= 0
    rows = store.read(locations[found[on_disk]]).view(np.float32)
    store.close()
    if keys.size != num_rows or not np.array_equal(rows[:, :dim], expected[on_disk]):
        raise AssertionError("rows are not what was written")
    return {
        "s": ended - start,
        "disk_index_s": opened - start,
        "key_index_s": ended - opened,
        "index_bytes": index_bytes,
        "rows_compared": int(on_disk.sum()),
    }


def large_requirements(told: Result) -> list[Result]:
    """What the figures must reach; nothing of what was left out."""
    if "left_out" in told:
        return []
    again = told["reopen"]
    limit = REOPEN_S + REOPEN_S_PER_GB * again["index_bytes"] / 1e9
    on_disk = told["ssd_rows"] * told["row_bytes"]
    return [
        requirement("large store: bytes of rows on the disk", on_disk, LEAST_ROW_BYTES),
        requirement("large store: seconds to reopen", again["s"], limit, at_least=False),
    ]


def large_lines(told: Result) -> list[str]:
    """The result for people."""
    if "left_out" in told:
        return [f"large store left out: {told['left_out']}"]
    again = told["reopen"]
    return [
        f"large store: {told['ssd_rows'] * told['row_bytes'] / 1e9:.2f} GB of {told['ssd_rows']:,} "
        f"rows on the disk, of {told['rows']:,}; written in {told['write_s']:.0f} s; "
        f"{told['samples_per_s']:,.0f} samples/s over {told['passes']} passes; reopened in "
        f"{again['s']:.2f} s (disk's index {again['disk_index_s']:.2f}, keys "
        f"{again['key_index_s']:.2f}; {again['index_bytes'] / 1e9:.2f} GB)"
    ]
