# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of tiers is made of, at sizes for CI: all that is not a time."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shutil

import numpy as np
import pytest

from benchmarks import tier_model, tier_task, tiers, workers
from benchmarks.report import summary
from benchmarks.tier_chart import draw_tiers
from benchmarks.tier_hits import HitWorkload, hit_lines, measure_hits
from benchmarks.tier_large import (
    LEAST_ROW_BYTES,
    LargeStore,
    large_lines,
    large_requirements,
    measure_large,
)
from benchmarks.tier_task import TierWorkload
from benchmarks.zipf_log import ZipfLog

ROWS, SLAB_SHARE = 5_000, 1 / 10
HITS = HitWorkload(num_keys=20_000, slab_rows=1000, batch=256, steady_passes=80)
FEW_HITS = HitWorkload(num_keys=2000, slab_rows=200, batch=64, steady_passes=12)


def test_ranks_follow_the_law():
    log = ZipfLog(num_keys=50)
    drawn = np.concatenate([log.ranks(number, 50_000) for number in range(10)])
    expected = np.arange(1, 51) ** -1.05
    expected *= drawn.size / expected.sum()
    counts = np.bincount(drawn, minlength=51)[1:]
    assert counts.sum() == drawn.size
    # Chi-squared of 49 degrees of freedom is above 86 once in a thousand.
    assert ((counts - expected) ** 2 / expected).sum() < 86
    assert np.array_equal(log.ranks(3, 100), log.ranks(3, 100))
    assert not np.array_equal(log.ranks(3, 100), log.ranks(4, 100))


def test_an_exchange_gives_hot_ranks_other_keys():
    log = ZipfLog(num_keys=50)
    ranks = np.arange(1, 51)
    before, after = log.keys(ranks), log.keys(ranks, exchanged=True)
    assert np.unique(before).size == 50
    assert set(before.tolist()) == set(after.tolist())
    assert not (before == after).any()


def test_hits_are_near_those_of_the_best_set():
    result = measure_hits(HITS)
    assert all(one["met"] for one in result["requirements"]), summary(result["requirements"])
    assert len(result["after_exchange"]) == 10
    assert result["after_exchange"][0] < 0.2  # or nothing was exchanged
    assert 0.6 < result["best_hit_rate"] < 0.9
    assert hit_lines(result)[0].startswith(f"hits: {result['steady']:.3f} of the best set's")


def test_the_model_is_as_large_as_its_step_takes_100_ms():
    def slow(share):  # 50 ms besides the model
        return 50 + 100 * share**1.5

    share = tier_model.share_of_widths(slow)
    assert slow(share) == pytest.approx(100)
    assert tier_model.share_of_widths(lambda share: 97.0) == 1
    assert tier_model.share_of_widths(lambda share: 200.0) == 1  # no model is seen in it
    assert tier_model.share_of_widths(lambda share: 150 + share) == 0.2
    workload = tier_model.with_widths(TierWorkload(), share)
    assert (workload.bottom, workload.top) == ((320, 160), (208, 96))
    assert tier_model.with_widths(TierWorkload(), 1.0) == TierWorkload()


class WorkerHere:
    """A worker in this process: to start one and to import jax takes as long as all it does."""

    def prepare(self, workload, **options):
        self.task = tier_task.prepare(TierWorkload(**workload.as_dict()), options)
        return self.task.facts

    def run(self, passes):
        return workers._timed(self.task, {"steps": passes})

    def ask(self, do):
        assert do == "memory"
        return self.task.memory()

    def close(self):
        self.task.close()
        del self.task


@pytest.fixture
def few_processes(monkeypatch):
    """The first worker alone is a process, as all are, and measures what it takes by itself."""
    start, count = tiers.tier, itertools.count()

    @contextlib.contextmanager
    def tier():
        if next(count) == 0:
            with start() as worker:
                yield worker
        else:
            with contextlib.closing(WorkerHere()) as worker:
                yield worker

    monkeypatch.setattr(tiers, "tier", tier)
    monkeypatch.setattr(tier_task, "measure_base", lambda _: 1)


@pytest.mark.slow
@pytest.mark.usefixtures("few_processes")
def test_the_benchmark_of_tiers(tmp_path):
    workload = TierWorkload(
        rows=ROWS,
        num_keys=20_000,
        features=3,
        batch=128,
        dim=8,
        slab_share=SLAB_SHARE,
        ram_share=0.05,
        bottom=(8,),
        top=(8,),
        passes=2,
    )
    large = dataclasses.replace(workload, tier="ssd", rows=20_000, slab_share=0.1, ram_share=0.1)
    measured = tiers.measure(
        tmp_path,
        rounds=2,
        workload=workload,
        hits_of=FEW_HITS,
        slabs=(1 / 4,),
        large=LargeStore(workload=large, passes=2),
    )
    result = json.loads(json.dumps(measured))
    for one in result["compared"].values():
        assert list(one["setups"]) == list(tiers.SETUPS)
        assert one["steps"] == 8
        sizes = {told["end"]["size"] for told in one["setups"].values()}
        assert len(sizes) == 1 and ROWS < sizes.pop() < one["workload"]["rows"] * 2
        for name, told in one["setups"].items():
            assert told["end"]["pass"]["hit_rate"] > 0
            assert (told["end"]["ssd_rows"] > 0) == name.startswith("ssd")
            if name != "device":
                assert told["end"]["device_rows"] <= SLAB_SHARE * ROWS
            nothing = [what for what, size in told["end"]["stated"].items() if not size]
            zero = ["rows on their way"] if name == "device" else []
            zero += ["keys not admitted"] if one["workload"]["min_count"] == 1 else []
            assert nothing == zero
    by_what = {one["what"]: one for one in result["requirements"]}
    on_disk = [one for what, one in by_what.items() if "rows on the disk" in what]
    assert len(on_disk) == 5 and all(one["met"] for one in on_disk[:4])
    assert len(result["requirements"]) == 2 + 2 * (3 + 3 + 2 + 8) + 2
    assert not by_what["device, admitted at 1: steps timed"]["met"]
    check_large(result["large"])
    text = tiers.table(result)
    assert text.endswith(summary(result["requirements"]))
    assert len(result["curve"]["points"]) == 5
    assert not list(tmp_path.iterdir())
    draw_tiers(result, tmp_path / "tiers.png")
    assert (tmp_path / "tiers.png").stat().st_size > 10_000


def check_large(told):
    assert told["rows"] == 20_000 and told["ssd_rows"] > 15_000
    assert told["reopen"]["rows_compared"] > 700
    assert large_lines(told)[0].startswith("large store: 0.00 GB of")


def test_a_store_too_large_for_the_disk_is_left_out(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3 * 10**9))
    told = measure_large(LargeStore(), tmp_path)
    assert large_lines(told) == [
        "large store left out: a store of 22,500,000 rows takes 13.2 GB, 3.0 GB are free"
    ]
    assert large_requirements(told) == [] and not list(tmp_path.iterdir())
    # What is told on the command line is enough.
    assert LargeStore().disk_bytes < tiers.LARGE_GIGABYTES * 1e9
    assert LargeStore().workload.rows * 512 * 0.9 > LEAST_ROW_BYTES


def test_the_keys_that_come_are_foretold():
    log = ZipfLog(num_keys=20_000)
    shares = np.arange(1, 20_001) ** -1.05
    shares /= shares.sum()
    for count in (1, 5, 60):
        expected = (1 - (1 - shares) ** (1000 * count)).sum()
        assert log.distinct(1000 * count) == pytest.approx(expected, rel=0.01)
    assert log.distinct(log.draws(5000)) == pytest.approx(5000, rel=0.002)
