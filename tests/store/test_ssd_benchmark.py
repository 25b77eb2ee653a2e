# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the store on disks, at a size for CI: all that is not a time."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from benchmarks import ssd
from benchmarks.report import summary
from tests.store.test_ssd_rows import readers


@pytest.mark.slow
def test_the_benchmark_of_the_store(tmp_path: pathlib.Path) -> None:
    """100 MB; the benchmark itself compares every row it reads."""
    result = ssd.measure(tmp_path, num_rows=100_000, rounds=1)
    assert result["benchmark"] == "ssd" and result["segments"] >= ssd.LEAST_SEGMENTS
    assert result["implementation"] == readers()[0]
    for name, told in result["median"].items():
        assert len(result["rounds"][name]) == 1
        if name.startswith("dense"):
            assert list(told) == ["1", "0.5", "0.2", "0.1"]
        if name.startswith("scattered"):
            assert (told["ratio"] is None) == (told["disk_reads_per_s"] is None)
    counts = len(result["requirements"]), len(ssd.requirements(result["median"], "pread"))
    assert counts == (10 if result["implementation"] == "io_uring" else 6, 6)
    assert not list(tmp_path.iterdir())
    text = ssd.table(result)
    assert f"reader: {result['implementation']}, 128 reads under way" in text
    assert "the disk's own rate: 64 of 4096 bytes" in text
    assert text.endswith(summary(result["requirements"]))


def test_wrong_rows_would_be_noticed() -> None:
    rows = ssd.Rows(10)
    numbers = np.array([3, 4])
    rows.check(rows.of(numbers), numbers)
    with pytest.raises(AssertionError, match="rows are not what was written"):
        rows.check(rows.of(numbers), numbers[::-1])
