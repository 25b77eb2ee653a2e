# SPDX-License-Identifier: Apache-2.0
"""`sum_levels` along planned levels: against its reference, and as accurate as it promises."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse.ops.segment_sum import (
    FAN_IN,
    bag_gradients,
    level_sizes,
    plan_levels,
    segment_sum,
    sum_levels,
)
from jaxsparse.ops.segment_sum.cases import CASES as GROUPS
from jaxsparse.ops.segment_sum.reference import (
    bag_gradients_reference,
    grouped_sum_reference,
    segment_sum_reference,
)


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


compiled = jax.jit(sum_levels, static_argnums=2)
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
        partial(sum_levels, num_segments=6),
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


# ---- by group ---------------------------------------------------------------------------------

IMPLEMENTATIONS = ("xla", "native")


def sum_of_terms(arguments):
    made = {n: None if arguments[n] is None else abs(arguments[n]) for n in ("weights", "scale")}
    grads = [abs(part) for part in arguments["grads"]]
    return bag_gradients_reference(**{**arguments, **made, "grads": grads})


@pytest.mark.parametrize(
    ("implementation", "names"),
    [
        ("native", tuple(GROUPS)),
        ("xla", ("scaled", "wild")),
        pytest.param("xla", tuple(GROUPS), marks=pytest.mark.slow),
    ],
)
def test_bag_gradients_equal_reference(implementation, names):
    cases = {name: GROUPS[name].arguments(seed) for seed, name in enumerate(names)}

    @jax.jit
    def run(cases):
        return {
            n: bag_gradients(**case, implementation=implementation) for n, case in cases.items()
        }

    for name, got in run(cases).items():
        want = bag_gradients_reference(**cases[name])
        assert got.dtype == np.float32
        bound = 1e-6 * sum_of_terms(cases[name])
        assert (np.abs(np.asarray(got) - want) <= bound).all(), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("ordered", [False, True])
def test_segment_sum_equals_reference(implementation, ordered):
    rng = np.random.default_rng(2)
    values = rng.normal(size=(60, 11)).astype(np.float32)
    offsets = np.array([0, 0, 40, 41, 57, 57], np.int32)
    order = rng.integers(-3, 64, 70).astype(np.int32) if ordered else None
    run = jax.jit(partial(segment_sum, implementation=implementation))
    got = np.asarray(run(values, offsets, order))
    want = grouped_sum_reference(values, offsets, order)
    assert (np.abs(got - want) <= 1e-6 * grouped_sum_reference(abs(values), offsets, order)).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_group_of_equal_tenths_keeps_its_accuracy(implementation):
    count = 100_000
    values, offsets = np.full((count, 1), 0.1, np.float32), np.array([0, 0, count], np.int32)
    got = jax.jit(partial(segment_sum, implementation=implementation))(values, offsets)
    want = count * float(np.float32(0.1))
    assert float(got[0, 0]) == 0
    assert abs(float(got[1, 0]) / want - 1) < 1e-6


def test_groups_out_of_range_read_and_write_nowhere():
    values, offsets = np.ones((4, 3), np.float32), np.array([-5, 2, 1, 900, 2**31 - 1], np.int32)
    got = segment_sum(values, offsets, implementation="native")
    assert got[:, 0].tolist() == [2, 0, 3, 0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"grads": ()}, "grads is empty, expected at least one array"),
        (
            {"grads": (np.ones((2, 8), np.float32), np.ones((2, 4), np.float32))},
            "grads[1] must be float32 [_, D = 8], got float32 [2, 4]",
        ),
        ({"grads": (jnp.ones((4, 8), jnp.bfloat16),)}, "grads[0] must be float32 [_, D], got"),
        ({"offsets": np.int32(3)}, "offsets must be int32 [K + 1], got int32 []"),
        ({"bags": np.zeros((6, 1), np.int32)}, "bags must be int32 [M], got int32 [6, 1]"),
        ({"ids": np.zeros(5, np.int32)}, "ids must be int32 [M = 6], got int32 [5]"),
        ({"weights": np.ones((3, 1), np.float32)}, "weights must be float32 [_], got float32"),
        ({"scale": np.ones(5, np.float32)}, "scale must be float32 [O = 4], got float32 [5]"),
    ],
)
def test_gradients_that_do_not_fit_together_are_refused(wrong, message):
    """A kernel would read beside them."""
    fitting = {
        "grads": (np.ones((1, 8), np.float32), np.ones((3, 8), np.float32)),
        "offsets": np.array([0, 2, 6], np.int32),
        "bags": np.zeros(6, np.int32),
        "ids": np.zeros(6, np.int32),
        "weights": np.ones(3, np.float32),
    }
    with pytest.raises(ValueError, match=re.escape(f"bag_gradients: {message}")):
        bag_gradients(**(fitting | wrong))


@pytest.mark.parametrize(
    ("values", "offsets", "order", "message"),
    [
        (np.ones(3, np.float32), np.arange(2), None, "values must be float32 [N, D], got"),
        (jnp.ones((3, 1), jnp.bfloat16), np.arange(2), None, "values must be float32 [N, D]"),
        (np.ones((3, 1), np.float32), np.zeros(0, np.int32), None, "offsets must be int32 [K + 1]"),
        (np.ones((3, 1), np.float32), np.arange(2), np.ones((1, 1), int), "order must be int32"),
    ],
)
def test_sums_of_what_does_not_fit_are_refused(values, offsets, order, message):
    with pytest.raises(ValueError, match=re.escape(f"segment_sum: {message}")):
        segment_sum(values, offsets, order)


def test_weights_need_ids():
    with pytest.raises(ValueError, match="weights are by id"):
        bag_gradients((jnp.ones((1, 1)),), jnp.arange(2), jnp.arange(1), weights=jnp.ones(1))
