# SPDX-License-Identifier: Apache-2.0
"""`segment_sum` along planned levels: against its reference, and as accurate as it promises."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse.ops.segment_sum import FAN_IN, level_sizes, plan_levels, segment_sum
from jaxsparse.ops.segment_sum.reference import segment_sum_reference


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def plan(segments, num_segments, grouped=False):
    """Levels of ``segments [N]``; entries outside ``[0, num_segments)`` go nowhere."""
    order = np.argsort(segments, kind="stable")
    inside = (segments[order] >= 0) & (segments[order] < num_segments)
    order = order[inside]
    slots, counts = np.unique(segments[order], return_counts=True)
    chosen = None if grouped else order
    return plan_levels(counts, slots, chosen, segments.size, num_segments)


compiled = jax.jit(segment_sum, static_argnums=2)
reference = jax.jit(segment_sum_reference, static_argnums=2)


CASES = {
    "none": (0, 4, "uniform"),
    "one": (1, 1, "uniform"),
    "uniform": (500, 37, "uniform"),
    "hot": (3000, 11, "hot"),
    "all_in_one": (4097, 3, "one"),
    "nowhere": (64, 5, "nowhere"),
    "distinct": (200, 200, "distinct"),
    "few_of_many": (40, 1000, "uniform"),
    "fan_in": (FAN_IN, 1, "one"),
    "fan_in_plus_one": (FAN_IN + 1, 1, "one"),
    "fan_in_squared_plus_one": (FAN_IN**2 + 1, 1, "one"),
}


def draw(rng, num_items, num_segments, kind):
    if kind == "uniform":
        return rng.integers(-1, num_segments + 1, num_items)
    if kind == "hot":
        return np.minimum(rng.zipf(1.2, num_items) - 1, num_segments)
    if kind == "distinct":
        return rng.permutation(num_segments)[:num_items]
    return np.full(num_items, {"one": num_segments - 1, "nowhere": num_segments}[kind])


@pytest.mark.parametrize("dim", [1, 7])
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name, dim):
    num_items, num_segments, kind = CASES[name]
    rng = np.random.default_rng([sorted(CASES).index(name), dim])
    segments = draw(rng, num_items, num_segments, kind)
    values = rng.normal(size=(num_items, dim)).astype(np.float32)
    levels = plan(segments, num_segments)
    assert tuple(level.size for level in levels) == level_sizes(num_items)
    got = np.asarray(compiled(values, levels, num_segments))
    exact = np.zeros((num_segments, dim))
    terms = np.zeros((num_segments, dim))
    inside = (segments >= 0) & (segments < num_segments)
    np.add.at(exact, segments[inside], values[inside].astype(np.float64))
    np.add.at(terms, segments[inside], np.abs(values[inside]).astype(np.float64))
    assert got.dtype == np.float32
    assert (np.abs(got - exact) <= 1e-6 * terms).all()
    want = np.asarray(reference(values, segments.astype(np.int32), num_segments))
    assert (np.abs(want - exact) <= 1e-6 * terms).all()


@pytest.mark.parametrize("name", CASES)
def test_sums_of_integers_are_exact(name):
    num_items, num_segments, kind = CASES[name]
    rng = np.random.default_rng(sorted(CASES).index(name))
    segments = draw(rng, num_items, num_segments, kind)
    values = rng.integers(-99, 100, (num_items, 3)).astype(np.float32)
    want = segment_sum_reference(jnp.asarray(values), jnp.asarray(segments, "int32"), num_segments)
    got = compiled(values, plan(segments, num_segments), num_segments)
    np.testing.assert_array_equal(got, want)


def test_items_already_grouped_need_no_order():
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(0, 9, 300))
    values = rng.normal(size=(300, 2)).astype(np.float32)
    with_order = compiled(values, plan(segments, 9), 9)
    without = compiled(values, plan(segments, 9, grouped=True), 9)
    np.testing.assert_array_equal(with_order, without)


def test_hot_segment_of_tenths_keeps_its_accuracy():
    count = 100_000
    values = np.full((count, 1), 0.1, np.float32)
    got = float(compiled(values, plan(np.zeros(count, np.int64), 1), 1)[0, 0])
    want = count * float(np.float32(0.1))
    one_by_one = float(np.add.accumulate(values[:, 0])[-1])
    assert abs(one_by_one - want) / want > 1e-5, "the plain sum is no longer a bad example"
    assert abs(got - want) / want < 1e-6


def test_no_slot_adds_more_than_the_fan_in():
    levels = plan(np.zeros(5000, np.int64), 1)
    for level in levels:
        counts = np.bincount(level)
        # The last bin is "nowhere", which adds nothing.
        assert counts[:-1].max(initial=0) <= FAN_IN


def test_runs_inside_shard_map(devices):
    mesh = js.make_mesh(devices=devices[:4])
    rng = np.random.default_rng(1)
    values = rng.normal(size=(4, 50, 3)).astype(np.float32)
    segments = rng.integers(0, 6, (4, 50))
    levels = [plan(part, 6) for part in segments]
    stacked = tuple(np.concatenate(level) for level in zip(*levels, strict=True))
    sharded = jax.shard_map(
        partial(segment_sum, num_segments=6),
        mesh=mesh,
        in_specs=(P("shard"), P("shard")),
        out_specs=P("shard"),
    )
    got = np.asarray(jax.jit(sharded)(values.reshape(200, 3), stacked)).reshape(4, 6, 3)
    for device in range(4):
        alone = compiled(values[device], levels[device], 6)
        np.testing.assert_array_equal(got[device], alone)


@given(st.lists(st.integers(-1, 5), max_size=120), st.integers(1, 5))
@settings(max_examples=60)
def test_levels_add_every_item_once(segments, num_segments):
    """Integers, summed in numpy as the levels say, so that nothing has to be compiled."""
    segments = np.array(segments, np.int64)
    values = np.arange(1, segments.size + 1)
    levels = plan(segments, num_segments)
    nowhere = num_segments + sum(level.size for level in levels[1:])
    sums = np.zeros(nowhere + 1, np.int64)
    np.add.at(sums, levels[0], values)
    start = num_segments
    for level in levels[1:]:
        np.add.at(sums, level, sums[start : start + level.size].copy())
        start += level.size
    want = [values[segments == s].sum() for s in range(num_segments)]
    assert sums[:num_segments].tolist() == want


def test_plan_writes_int32_and_marks_nowhere():
    (level,) = plan(np.array([1, -1, 0]), 2)
    assert level.dtype == np.int32
    assert level.tolist() == [1, 2, 0]
