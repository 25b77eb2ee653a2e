# SPDX-License-Identifier: Apache-2.0
"""Rows in memory and on disks, against a dict."""

from __future__ import annotations

import numpy as np

from jaxsparse.store.host_rows import MAX_GARBAGE, HostRows
from jaxsparse.store.hotness import Hotness
from jaxsparse.store.ram import RamRows
from jaxsparse.store.residency import Residency
from jaxsparse.store.ssd import SegmentStore
from jaxsparse.store.tier_clock import MOST_SPANS, TierClock

WORDS = 6


def keys_of(rows):
    return rows.astype(np.uint64) + np.uint64(1000)


def int32s(values):
    return np.array(list(values), np.int32)


def test_ram_rows_equal_a_dict():
    rng, ram, want = np.random.default_rng(0), RamRows(40, WORDS), {}
    for _ in range(200):
        rows = rng.permutation(60)[:8].astype(np.int32)
        if rng.random() < 0.5:
            ram.drop(rows)
            for row in rows.tolist():
                want.pop(row, None)
        elif len({*want, *rows.tolist()}) <= 40:
            words = rng.integers(0, 2**32, (8, WORDS), np.uint32)
            ram.write(rows, words)
            want |= dict(zip(rows.tolist(), words, strict=True))
        assert len(ram) == len(want)
        assert sorted(ram.rows().tolist()) == sorted(want)
        every = int32s(range(60))
        assert ram.holds(every).tolist() == [row in want for row in range(60)]
        held = int32s(want)
        assert ram.read(held).tolist() == [want[row].tolist() for row in want]
    assert ram.nbytes < 2**16


def test_host_rows_equal_a_dict_and_garbage_is_rewritten(tmp_path):
    rng, want = np.random.default_rng(1), {}
    disks = SegmentStore([tmp_path], table="t", row_bytes=4 * WORDS, segment_bytes=1 << 12)
    host = HostRows(300, WORDS, 20, disks)
    tidied = 0
    for turn in range(150):
        rows = int32s(row for row in rng.permutation(300)[:25] if row not in want)
        words = rng.integers(0, 2**32, (rows.size, WORDS), np.uint32)
        host.put(rows, words, rows.astype(np.float32), keys_of)
        want |= dict(zip(rows.tolist(), words, strict=True))
        gone = rng.permutation(list(want))[:22].astype(np.int32)
        host.drop(gone)
        for row in gone.tolist():
            del want[row]
        if turn % 10 == 9:
            disks.flush()
            host.tidy()
            stats = disks.stats()
            tidied += stats["compactions"] > 0
            assert stats["garbage_rows"] <= MAX_GARBAGE * (
                stats["garbage_rows"] + stats["live_rows"]
            ) + 2 * (1 << 12) // (4 * WORDS)
        held = int32s(want)
        assert host.read(held).tolist() == [want[row].tolist() for row in want]
        assert host.holds(int32s(range(300))).tolist() == [row in want for row in range(300)]
        assert len(host.ram) <= 20
    # Those worth most are in memory.
    assert tidied > 0 and len(want) > 25
    in_ram = host.ram.rows()
    assert host.moved["ssd_written"] > 0 and host.moved["ram_written"] > 0
    assert in_ram.mean() > np.mean(list(want))
    host.close()


def test_residency_equals_a_dict():
    rng, known = np.random.default_rng(2), Residency("t", 12)
    hotness, at, made = Hotness(), {}, set()
    no_next = int32s([])
    for _ in range(300):
        needed = np.sort(rng.permutation(40)[: rng.integers(1, 9)]).astype(np.int32)
        is_made = known.is_made(needed)
        assert is_made.tolist() == [row in made for row in needed.tolist()]
        new = needed[~is_made]
        hotness.add(needed, np.ones(needed.size, np.int64))
        numbers = new.astype(np.uint64)
        moves = known.plan(needed[is_made], new, numbers, no_next, hotness)
        assert {row: at[row] for row in moves.out_rows.tolist()} == dict(
            zip(moves.out_rows.tolist(), moves.out_places.tolist(), strict=True)
        )
        if rng.random() < 0.2:
            known.cancel(moves)
            continue
        after = known.places_after(needed, moves).tolist()
        known.commit(moves)
        for row in moves.out_rows.tolist():
            del at[row]
        at |= dict(zip(needed.tolist(), after, strict=True))
        made |= set(needed.tolist())
        assert known.places(needed).tolist() == after
        if rng.random() < 0.3:
            gone = needed[:2]
            known.forget(gone)
            for row in gone.tolist():
                del at[row]
                made.discard(row)
        assert sorted(at) == sorted(known.resident().tolist())
        assert len(set(at.values())) == len(at) <= 12
        assert known.num_resident == len(at)


def test_a_residency_that_is_tidied_gives_places_as_one_that_is_restored():
    saved, hotness = Residency("t", 8), Hotness()
    nobody, no_next = int32s([]), int32s([])

    def place(known, new, **options):
        numbers = np.zeros(new.size, np.uint64)
        moves = known.plan(nobody, new, numbers, no_next, hotness, **options)
        known.commit(moves)
        return moves.new_places.tolist()

    assert place(saved, int32s(range(6))) == list(range(6))
    for row in (1, 4):
        saved.forget(int32s([row]))
    # Lent to an evaluation: the place given back last comes first.
    assert place(saved, int32s([-1]), is_lent=True) == [4]
    saved.tidy()
    live, restored = saved.resident(), Residency("t", 8)
    restored.take_in(live, saved.places(live))
    assert place(saved, int32s([7, 8, 9])) == place(restored, int32s([7, 8, 9])) == [1, 4, 6]


def test_a_clock_that_nobody_asks_keeps_the_latest_spans_only():
    clock = TierClock()
    for number in range(MOST_SPANS + 9):
        with clock.busy(f"tier {number}"):
            pass
    waited = clock.waited(0.0, 0.0)
    assert len(waited) == MOST_SPANS and f"tier {MOST_SPANS + 8}" in waited
