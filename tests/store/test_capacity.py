# SPDX-License-Identifier: Apache-2.0
"""The plan of a stored table says what a full one takes."""

from __future__ import annotations

import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.store import mover
from jaxsparse.store.capacity import BLOCKS_AT_A_TIME, SCRATCH_BYTES, moving_bytes, plan_host
from tests.store.stores import Stored, dynamic

KEYS, PLACES, IN_RAM = 40_000, 3_000, 9_000
SETUPS = {
    "device": lambda folder: None,
    "ram": lambda folder: js.Tiers(device_rows=PLACES),
    "ssd": lambda folder: js.Tiers(device_rows=PLACES, host_rows=IN_RAM, ssd=[folder]),
}


@pytest.mark.parametrize("setup", SETUPS)
def test_the_plan_agrees_with_a_full_table(setup, tmp_path):
    table = dynamic("t", KEYS, 4, js.Adagrad(0.1), SETUPS[setup](tmp_path))
    planned = plan_host(table)
    with Stored([js.FeatureSpec("f", table)]) as full:
        keys = np.random.default_rng(0).permutation(KEYS).astype(np.int64) * (2**40 + 1)
        full.train([{"f": part} for part in keys.reshape(-1, 1000)], batches_per_pass=1)
        full.store.flush(full.state)
        stats, one = full.store.stats()["t"], full.store._tables["t"]
        on_device = full.emb.plan.bytes_per_device[0]
    assert stats["size"] == KEYS and planned.row_bytes == one.row_bytes == 32
    assert planned.device_rows == stats["device_rows"]
    assert on_device == planned.device_rows * 32
    # Full memory gives a 64th of its rows to the disks at a time.
    assert IN_RAM // 50 >= planned.ram_rows - stats["host_rows"] >= 0
    assert planned.ram_rows + planned.disk_rows == stats["host_rows"] + stats["ssd_rows"]
    index, in_ram = one.known.index.nbytes, one.host.ram._high_water * 32
    if one.known.index.implementation == "native":
        # Small ones take a little more than those that were measured.
        assert 0.7 * planned.index_bytes <= index <= 1.05 * planned.index_bytes
    counters = stats["host_bytes"] - index - in_ram + SCRATCH_BYTES * KEYS
    assert counters == pytest.approx(planned.counter_bytes, rel=0.15)
    assert in_ram == pytest.approx(planned.ram_bytes, rel=0.15)
    assert ("ssd" in stats) == (setup == "ssd") == (planned.disk_bytes > 0)
    if "ssd" in stats:
        live, garbage = stats["ssd_rows"], stats["ssd"]["garbage_rows"]
        whole = planned.disk_bytes * (live + garbage) / live
        assert stats["ssd"]["disk_bytes"] == pytest.approx(whole, rel=0.1)
        assert stats["ssd"]["memory_bytes"] <= planned.disk_memory_bytes


def test_filters_times_and_disks_are_counted(tmp_path):
    plain = plan_host(dynamic("t", 1000)).counter_bytes
    bloom = dynamic("t", 1000, admission=js.BloomAdmission(2, bytes=4096))
    assert plan_host(bloom).counter_bytes == plain + 4096
    timed = dynamic("t", 1000, eviction=js.TTL(seconds=5.0))
    assert plan_host(timed).counter_bytes == plain + 8 * 1024
    fixed = js.TableSpec("t", vocabulary_size=10**6, embedding_dim=4, tiers=SETUPS["ssd"](tmp_path))
    told = plan_host(fixed)
    assert (told.ram_rows, told.disk_rows) == (IN_RAM, 10**6 - PLACES - IN_RAM)
    assert told.host_bytes > told.index_bytes + told.counter_bytes + told.ram_bytes


def test_blocks_of_rows_on_their_way_are_as_large_as_is_told(monkeypatch):
    blocks = []
    make = mover.aligned_empty
    monkeypatch.setattr(
        mover, "aligned_empty", lambda *kind: blocks.append(make(*kind)) or blocks[-1]
    )
    table = dynamic("t", 10_000, 4, js.Adagrad(0.1), js.Tiers(device_rows=1500))
    with Stored([js.FeatureSpec("f", table)]) as one:
        keys = np.arange(2000).reshape(2, 1000)
        one.train([{"f": keys[n % 2]} for n in range(4)], batches_per_pass=1)
        come = one.store.bytes_moved()["ram_read_bytes"] // 32
    # The second pass leaves 500 places empty; each later one takes back what the one before left.
    assert blocks and come == sum(500 for _ in blocks)
    assert {block.nbytes for block in blocks} == {moving_bytes(table, 500) // BLOCKS_AT_A_TIME}
