# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of tiers is made of, at sizes for CI: all that is not a time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import tiers
from benchmarks.report import summary
from benchmarks.tier_chart import draw_tiers
from benchmarks.tier_hits import HitWorkload, hit_lines, measure_hits
from benchmarks.tier_task import TierWorkload
from benchmarks.zipf_log import ZipfLog

HITS = HitWorkload(num_keys=20_000, slab_rows=1000, batch=256, steady_passes=80)


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


@pytest.mark.slow
def test_the_benchmark_of_tiers(tmp_path):
    workload = TierWorkload(
        rows=10_000,
        num_keys=60_000,
        features=3,
        batch=128,
        dim=8,
        bottom=(8,),
        top=(8,),
        steps=100,
        passes=2,
    )
    result = json.loads(json.dumps(tiers.measure(2, workload, HITS)))
    for one in result["compared"].values():
        assert list(one["setups"]) == list(tiers.SETUPS)
        assert one["steps"] == 8
        sizes = {told["end"]["size"] for told in one["setups"].values()}
        assert len(sizes) == 1 and sizes.pop() > 10_000
        for name, told in one["setups"].items():
            assert told["end"]["pass"]["hit_rate"] > 0
            assert (told["end"]["ssd_rows"] > 0) == name.startswith("ssd")
            if name != "device":
                assert told["end"]["device_rows"] <= 1000
    by_what = {one["what"]: one for one in result["requirements"]}
    on_disk = [one for what, one in by_what.items() if "rows on the disk" in what]
    assert len(on_disk) == 4 and all(one["met"] for one in on_disk)
    assert len(by_what) == 12
    text = tiers.table(result)
    assert text.endswith(summary(result["requirements"]))
    assert len(result["curve"]["points"]) == 9
    draw_tiers(result, tmp_path / "tiers.png")
    assert (tmp_path / "tiers.png").stat().st_size > 10_000
