# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of sums and of `unique` in Pallas's interpreter, which needs no GPU."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jaxsparse as js
from jaxsparse.ops.embedding_bag import cases as bag_cases
from jaxsparse.ops.embedding_bag.gpu import embedding_bag_triton
from jaxsparse.ops.embedding_bag.reference import embedding_bag_reference
from jaxsparse.ops.row_update.cases import HeavyBall
from jaxsparse.ops.row_update.gpu import count_not_finite_triton, row_update_triton
from jaxsparse.ops.segment_sum import cases as group_cases
from jaxsparse.ops.segment_sum.gpu import bag_gradients_triton, segment_sum_triton
from jaxsparse.ops.segment_sum.grouped_gpu import FAN_IN, LONG, pieces
from jaxsparse.ops.segment_sum.reference import bag_gradients_reference
from jaxsparse.ops.triton import MAX_DIM
from jaxsparse.ops.unique import cases as unique_cases
from jaxsparse.ops.unique.gpu import PART, unique_triton
from jaxsparse.ops.unique.reference import unique_reference


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


def some(names, quick):
    """All names; those not in ``quick`` are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def as_arrays(arguments):
    return jax.tree.map(jnp.asarray, arguments)


def without_signs(arguments, *names):
    """The same arguments with absolute values: what the rounding of their sums is measured by."""
    return {
        name: jax.tree.map(np.abs, value) if name in names else value
        for name, value in arguments.items()
    }


# ---- the interpreter ----------------------------------------------------------------------------


def test_the_interpreter_runs_what_the_gpu_would(monkeypatch):
    """Every kernel goes through `pallas_call`, with the flag that it was given."""
    calls = []
    call = pl.pallas_call

    def spy(kernel, **options):
        calls.append((options["name"], options["interpret"]))
        return call(kernel, **options)

    monkeypatch.setattr(pl, "pallas_call", spy)
    values, offsets = jnp.ones((3 * FAN_IN, 2)), jnp.array([0, 3 * FAN_IN], jnp.int32)
    sums = segment_sum_triton(values, offsets, interpret=True)
    assert sums.tolist() == [[96.0, 96.0]]
    assert calls == [("bag_gradients_blocks_1", True), ("bag_gradients", True)]


# ---- sums by segment ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", some(bag_cases.CASES, ("hot_bag", "bfloat16_one_id")))
def test_embedding_bag(name):
    case = bag_cases.CASES[name]
    given = case.arguments()
    run = jax.jit(partial(embedding_bag_triton, case.parts, interpret=True))
    pooled = run(**as_arrays(given))
    assert tuple(part.shape[0] for part in pooled) == case.parts
    terms = embedding_bag_reference(**without_signs(given, "table", "weights", "scale"))
    error = np.abs(np.concatenate(pooled) - embedding_bag_reference(**given))
    assert (error <= 1e-6 * terms).all()


@pytest.mark.parametrize("name", some(group_cases.CASES, ("wild",)))
def test_bag_gradients(name):
    given = group_cases.CASES[name].arguments()
    got = jax.jit(partial(bag_gradients_triton, interpret=True))(**as_arrays(given))
    terms = bag_gradients_reference(**without_signs(given, "grads", "weights", "scale"))
    assert (np.abs(got - bag_gradients_reference(**given)) <= 1e-6 * terms).all()


def test_pieces_of_a_long_segment_hold_every_item_once():
    rng = np.random.default_rng(0)
    first = rng.integers(0, 3 * FAN_IN**2, 4000)
    last = first + LONG + (rng.integers(0, 70, 4000) ** 2) % (3 * FAN_IN**2 + 17)
    for num_levels in (1, 2):
        cut = pieces(jnp.asarray(first, jnp.int32), jnp.asarray(last, jnp.int32), num_levels)
        levels = [level for level, _, _ in cut]
        assert levels == [*range(num_levels + 1), *reversed(range(num_levels))]
        spans = [[np.asarray(end) * FAN_IN**level for end in ends] for level, *ends in cut]
        assert sum(end - begin for begin, end in spans).tolist() == (last - first).tolist()
        place = first
        for begin, end in spans:
            assert (begin <= end).all()
            assert ((begin == place) | (begin == end)).all()
            place = np.where(begin < end, end, place)
        assert (place == last).all()


def test_lengths_around_the_blocks_are_summed_exactly():
    """Integers, so that a lost or doubled item shows; starts are not whole blocks."""
    edges = [0, 1, FAN_IN - 1, FAN_IN, LONG - 1, LONG, LONG + 1, 3 * FAN_IN, FAN_IN**2 - 1]
    lengths = [5, *edges, 0, FAN_IN**2 + LONG, 2 * FAN_IN**2 + 1, *reversed(edges)]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rng = np.random.default_rng(0)
    values = rng.integers(-9, 10, (offsets[-1] + 3, 3)).astype(np.float32)
    got = jax.jit(partial(segment_sum_triton, interpret=True))(values, offsets)
    want = [values[a:b].sum(axis=0) for a, b in pairwise(offsets)]
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_a_row_with_many_equal_gradients_keeps_its_accuracy():
    count = 100_000
    grads, bags = jnp.full((1, 1), 0.1), jnp.zeros(count, jnp.int32)
    run = jax.jit(partial(bag_gradients_triton, interpret=True))
    got = run((grads,), jnp.array([0, count, count], jnp.int32), bags)
    assert abs(got[0, 0] / (count * np.float64(np.float32(0.1))) - 1) < 1e-6
    assert got[1, 0] == 0


def test_sums_depend_on_no_neighbour():
    """Of a long segment: the same bits wherever its blocks are the same."""
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.normal(size=(3 * FAN_IN**2, 2)), jnp.float32)
    run = jax.jit(partial(segment_sum_triton, interpret=True))
    begin, end = FAN_IN + 5, 2 * FAN_IN**2 + 77
    among = run(values, jnp.array([0, 7, begin, end, end + 100], jnp.int32))
    alone = run(values, jnp.array([begin, end, end, end, end], jnp.int32))
    np.testing.assert_array_equal(among[2], alone[0])


# ---- unique -------------------------------------------------------------------------------------

UNIQUE_CASES = {case.name: case for case in unique_cases.CASES}


@pytest.mark.parametrize("name", some(UNIQUE_CASES, ("outside", "skewed")))
def test_unique(name):
    case = UNIQUE_CASES[name]
    rows = case.rows()
    got = jax.jit(partial(unique_triton, num_rows=case.num_rows, interpret=True))(rows)
    for part, want in zip(got, unique_reference(rows, case.num_rows), strict=True):
        np.testing.assert_array_equal(part, want)


@pytest.mark.slow
@pytest.mark.parametrize("size", [PART - 1, PART, PART + 1])
def test_unique_at_the_edges_of_a_part(size):
    rows = np.random.default_rng(size).integers(0, 90, size).astype(np.int32)
    got = jax.jit(partial(unique_triton, num_rows=80, interpret=True))(rows)
    for part, want in zip(got, unique_reference(rows, 80), strict=True):
        np.testing.assert_array_equal(part, want)


# ---- what they refuse ---------------------------------------------------------------------------


def test_rows_that_are_too_wide_are_refused():
    table, slots = jnp.zeros((2, MAX_DIM + 1)), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=r"embedding_bag: .* takes 1 to 1024 columns, got 1025"):
        embedding_bag_triton((1,), table, None, slots)


def test_a_rule_of_the_user_s_own_is_refused():
    given = as_arrays((np.zeros((2, 1)), {}, np.zeros(1, np.int32), np.zeros((1, 1))))
    with pytest.raises(ValueError, match=r"row_update: .* jaxsparse\.optimizers, got HeavyBall"):
        row_update_triton(HeavyBall(), 0, *given, None, None, None)


def test_nothing_to_do_launches_nothing():
    empty = jnp.zeros(0, jnp.int32)
    (pooled,) = embedding_bag_triton((2,), jnp.zeros((0, 3)), None, jnp.zeros(2, jnp.int32))
    assert pooled.shape == (2, 3)
    assert segment_sum_triton(jnp.zeros((0, 3)), jnp.zeros(3, jnp.int32)).shape == (2, 3)
    assert [part.tolist() for part in unique_triton(empty, 5)] == [[], [], [0]]
    slab = jnp.ones((2, 3))
    args = slab, {}, empty, jnp.zeros((0, 3)), None, None
    assert row_update_triton(js.SGD(0.1), 0, *args, None)[0] is slab
    assert count_not_finite_triton(js.SGD(0.1), 0, *args) == 0
