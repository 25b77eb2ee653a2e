# SPDX-License-Identifier: Apache-2.0
"""Buckets and rungs: they hold what is asked, tightly, and a run meets few of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxsparse.ladder import (
    FACTOR,
    SLACK_BATCHES,
    Ladder,
    SlabNeed,
    SlabShape,
    bucket,
    rung,
    rungs,
    smallest_shape,
)


def test_buckets_hold_and_are_at_most_a_quarter_larger():
    counts = np.unique(np.geomspace(1, 2**30, 20_000).astype(np.int64))
    sizes = np.array([bucket(int(count)) for count in counts])
    assert (sizes >= counts).all()
    assert (sizes <= FACTOR * counts).all()
    assert [bucket(int(size)) for size in np.unique(sizes)] == np.unique(sizes).tolist()
    assert bucket(0) == 0


def test_300_sizes_meet_few_buckets():
    sizes = np.random.default_rng(0).integers(3_000, 9_000, 300)
    assert len({bucket(int(size)) for size in sizes}) <= 7


@pytest.mark.parametrize("top", [0, 1, 2, 5, 10, 97, 1_000, 106_496])
def test_rungs_rise_by_at_most_a_quarter_to_the_top(top):
    sizes = rungs(top)
    assert sizes[0] == 1 and sizes[-1] == max(top, 1)
    for low, high in itertools.pairwise(sizes):
        assert low < high <= max(low + 1, FACTOR * low + 1)


@pytest.mark.parametrize("top", [1, 10, 97, 1_000])
def test_rung_is_the_smallest_that_holds(top):
    sizes = rungs(top)
    for need in range(top + 1):
        assert rung(need, top) == min(size for size in sizes if size >= need)


def test_rung_above_the_top_is_the_top():
    # Only the head-room of a `Ladder` can ask for more than all local ids.
    assert rung(10.5, 10) == 10


def test_smallest_shape_counts_fixed_and_ragged_ids():
    assert smallest_shape(SlabNeed(fixed_ids=10, ragged_ids=9, rows=20)) == SlabShape(10, 20)
    assert smallest_shape(SlabNeed(0, 0, 0)) == SlabShape(0, 1)


def fits(need, shape):
    return need.ragged_ids <= shape.ragged_ids and need.rows <= shape.capacity


def test_ladder_always_holds_the_batch_and_changes_rarely():
    rng = np.random.default_rng(1)
    ladder = Ladder()
    shapes = set()
    for _ in range(500):
        rows = int(1_000 * rng.uniform(0.97, 1.03))
        ragged = int(5_000 * rng.uniform(0.95, 1.05))
        need = SlabNeed(fixed_ids=2_000, ragged_ids=ragged, rows=rows)
        (shape,) = ladder.shapes((need,))
        assert fits(need, shape)
        assert shape.ragged_ids <= FACTOR * ragged
        shapes.add(shape)
    assert len(shapes) <= 4


def test_ladder_goes_up_at_once():
    ladder = Ladder()
    (low,) = ladder.shapes((SlabNeed(1_000, 0, 100),))
    (high,) = ladder.shapes((SlabNeed(1_000, 0, 700),))
    (still,) = ladder.shapes((SlabNeed(1_000, 0, 650),))
    assert low.capacity < 700 <= high.capacity == still.capacity


def test_ladder_comes_down_after_long_slack_only():
    ladder = Ladder()
    (high,) = ladder.shapes((SlabNeed(1_000, 0, 700),))
    for _ in range(SLACK_BATCHES):
        (shape,) = ladder.shapes((SlabNeed(1_000, 0, 100),))
        assert shape == high
    (shape,) = ladder.shapes((SlabNeed(1_000, 0, 100),))
    assert 100 <= shape.capacity < 200


def test_one_full_batch_ends_the_slack():
    ladder = Ladder()
    (high,) = ladder.shapes((SlabNeed(1_000, 0, 700),))
    for _ in range(3):
        for _ in range(SLACK_BATCHES):
            assert ladder.shapes((SlabNeed(1_000, 0, 100),)) == (high,)
        assert ladder.shapes((SlabNeed(1_000, 0, 690),)) == (high,)


def test_slabs_have_rungs_of_their_own():
    ladder = Ladder()
    small, large = ladder.shapes((SlabNeed(50, 0, 5), SlabNeed(1_000, 0, 900)))
    assert small.capacity <= 10 and large.capacity >= 900


def test_ladder_never_exceeds_the_local_ids():
    (shape,) = Ladder().shapes((SlabNeed(8, 0, 8),))
    assert shape == SlabShape(0, 8)
