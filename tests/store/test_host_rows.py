# SPDX-License-Identifier: Apache-2.0
"""Rows in memory and on disks, against a dict."""

from __future__ import annotations

import numpy as np
import pytest

from jaxsparse.store.eviction import HALF_LIFE_BATCHES, Counters
from jaxsparse.store.host_rows import MAX_GARBAGE, HostRows
from jaxsparse.store.hotness import Hotness
from jaxsparse.store.ram import RamRows
from jaxsparse.store.residency import EMPTY, Residency
from jaxsparse.store.ssd import DamagedSegmentError, SegmentStore
from jaxsparse.store.tier_clock import MOST_SPANS, TierClock

WORDS = 6


def keys_of(rows):
    return rows.astype(np.uint64) + np.uint64(1000)


def int32s(values):
    return np.array(list(values), np.int32)


def resident(known):
    """All rows on the devices."""
    return known.row_at[known.row_at != EMPTY]


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


def test_rows_read_early_are_read_once_and_as_they_are_now(tmp_path):
    disks = SegmentStore([tmp_path], table="t", row_bytes=4 * WORDS)
    host, rows = HostRows(40, WORDS, 0, disks), int32s(range(30))
    words = np.random.default_rng(2).integers(0, 2**32, (30, WORDS), np.uint32)
    worth = np.zeros(30, np.float32)
    host.put(rows, words, worth, keys_of)
    host.flush()
    host.read_early(rows[:20])
    read = host.moved["ssd_read"]
    assert read == 20 * 4 * WORDS
    # Row 3 has left, and came back with other words.
    host.drop(rows[3:4])
    words[3] += np.uint32(1)
    host.put(rows[3:4], words[3:4], worth[3:4], keys_of)
    assert np.array_equal(host.read(rows[::-1]), words[::-1])
    assert host.moved["ssd_read"] == read + 11 * 4 * WORDS
    # A row that is damaged hurts nobody who does not ask for it.
    host.flush()
    file = min(tmp_path.glob("segment-*"))
    data = bytearray(file.read_bytes())
    at = data.find(words[5].tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    host.read_early(rows[4:20])
    assert np.array_equal(host.read(rows[6:20]), words[6:20])
    with pytest.raises(DamagedSegmentError, match="the checksum of row 5 differs"):
        host.read(rows[5:6])
    host.forget_early()
    host.close()


def test_worth_is_that_of_frequent_rows_and_fades():
    counters = Counters(with_times=False)
    counters.grow(3)
    counters.add(int32s([0, 1]), np.array([7, 1]), 0, 0.0)
    counters.add(int32s([2]), np.array([1]), 2 * HALF_LIFE_BATCHES, 0.0)
    # Row 0: 8 with one added, halved twice; row 2: 2; row 1: 2, halved twice.
    np.testing.assert_allclose(counters.worth(int32s([0, 2, 1])), [3, 3, 1])


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
        assert sorted(at) == sorted(resident(known).tolist())
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
    live, restored = resident(saved), Residency("t", 8)
    restored.take_in(live, saved.places(live))
    assert place(saved, int32s([7, 8, 9])) == place(restored, int32s([7, 8, 9])) == [1, 4, 6]


def test_a_clock_that_nobody_asks_keeps_the_latest_spans_only():
    clock = TierClock()
    for number in range(MOST_SPANS + 9):
        with clock.busy(f"tier {number}"):
            pass
    waited = clock.waited(0.0, 0.0)
    assert len(waited) == MOST_SPANS and f"tier {MOST_SPANS + 8}" in waited
