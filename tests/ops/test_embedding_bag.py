# SPDX-License-Identifier: Apache-2.0
"""`embedding_bag`: every implementation against the float64 reference."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse.ops.embedding_bag import embedding_bag
from jaxsparse.ops.embedding_bag.cases import CASES
from jaxsparse.ops.embedding_bag.reference import embedding_bag_reference

IMPLEMENTATIONS = ("xla", "native")
QUICK_ON_XLA = ("scaled", "ragged", "wild")
"""XLA takes most of a second to compile a case with ragged bags, a kernel is there already."""


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


def sum_of_terms(arguments):
    """The same sums of absolute values: what their rounding is measured by."""
    names = ("table", "weights", "scale")
    made = {n: None if arguments[n] is None else abs(arguments[n]) for n in names}
    return embedding_bag_reference(**{**arguments, **made})


@pytest.mark.parametrize(
    ("implementation", "names"),
    [
        ("native", tuple(CASES)),
        ("xla", QUICK_ON_XLA),
        pytest.param("xla", tuple(CASES), marks=pytest.mark.slow),
    ],
)
def test_equals_reference(implementation, names):
    arguments = {name: CASES[name].arguments(seed) for seed, name in enumerate(names)}

    @jax.jit
    def run(arguments):
        return {
            name: embedding_bag(**given, parts=CASES[name].parts, implementation=implementation)
            for name, given in arguments.items()
        }

    for name, pooled in run(arguments).items():
        assert tuple(part.shape[0] for part in pooled) == CASES[name].parts
        got = np.concatenate(pooled)
        want = embedding_bag_reference(**arguments[name])
        assert got.dtype == np.float32
        bound = 1e-6 * sum_of_terms(arguments[name])
        assert (np.abs(got - want) <= bound).all(), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_bag_of_equal_ids_keeps_its_accuracy(implementation):
    table = np.full((3, 2), 0.1, np.float32)
    slots, offsets = np.full(100_000, 1, np.int32), np.array([0, 100_000, 100_000], np.int32)
    run = jax.jit(partial(embedding_bag, implementation=implementation))
    (got,) = run(table, None, slots, offsets)
    want = 1e5 * np.float64(np.float32(0.1))
    assert abs(got[0] / want - 1).max() < 1e-6
    assert not got[1].any()


def test_offsets_out_of_range_read_and_write_nowhere():
    table, slots = np.ones((2, 3), np.float32), np.zeros(4, np.int32)
    offsets = np.array([-5, 2, 1, 900, 2**31 - 1], np.int32)
    (got,) = embedding_bag(table, None, slots, offsets, implementation="native")
    assert got[:, 0].tolist() == [2, 0, 3, 0]


def test_bags_longer_than_a_block_depend_on_neither_neighbours_nor_threads():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(50, 9)).astype(np.float32)
    slots = rng.integers(0, 50, 30_000).astype(np.int32)
    offsets = np.array([0, 1, 9_000, 9_003, 30_000], np.int32)
    run = partial(embedding_bag, table, None, implementation="native")
    (together,) = run(slots, offsets)
    for bag in range(4):
        part = slots[offsets[bag] : offsets[bag + 1]]
        (alone,) = run(part, np.array([0, part.size], np.int32))
        np.testing.assert_array_equal(together[bag], alone[0])


def test_derivatives_are_those_of_sums():
    given = CASES["weighted"].arguments()
    names = ("table", "weights", "scale")

    def loss(implementation, *floats):
        call = {**given, **dict(zip(names, floats, strict=True))}
        pooled = embedding_bag(**call, parts=(9, 9), implementation=implementation)
        return sum(jnp.sum(part**2) for part in pooled)

    floats = [jnp.asarray(given[name]) for name in names]
    got, want = (
        jax.jit(jax.grad(partial(loss, way), argnums=(0, 1, 2)))(*floats) for way in IMPLEMENTATIONS
    )
    for name, one, other in zip(names, got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4, err_msg=name)


def test_runs_inside_shard_map(devices):
    mesh = js.make_mesh(devices=devices[:4])
    rng = np.random.default_rng(1)
    table = rng.normal(size=(4, 10, 3)).astype(np.float32)
    slots = rng.integers(0, 10, (4, 6)).astype(np.int32)
    sharded = jax.shard_map(
        lambda table, slots: embedding_bag(table, None, slots, implementation="native")[0],
        mesh=mesh,
        in_specs=P("shard"),
        out_specs=P("shard"),
        check_vma=False,
    )
    got = jax.jit(sharded)(table.reshape(40, 3), slots.reshape(24))
    want = np.take_along_axis(table, slots[..., None], axis=1)
    np.testing.assert_array_equal(got, want.reshape(24, 3))


def test_the_kernel_is_what_runs():
    lowered = jax.jit(partial(embedding_bag, implementation="native")).lower(
        jnp.zeros((4, 2)), None, jnp.zeros((3,), jnp.int32)
    )
    assert "jaxsparse_embedding_bag" in lowered.as_text()


@pytest.mark.parametrize("parts", [(1, 1), (4, -1)])
def test_parts_that_do_not_add_up_are_refused(parts):
    with pytest.raises(ValueError, match=r"parts must be 0 or more and add up to 3, got \("):
        embedding_bag(jnp.zeros((4, 2)), None, jnp.zeros((3,), jnp.int32), parts=parts)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"table": np.ones((4, 8), np.float16)}, "table must be float32 or bfloat16 [R, D], got"),
        ({"table": np.ones((4, 8), np.int8)}, "got int8 [4, 8]"),
        ({"table": np.ones(4, np.float32)}, "got float32 [4]"),
        ({"rows": np.zeros((2, 2), np.int32)}, "rows must be int32 [K], got int32 [2, 2]"),
        ({"slots": np.zeros(6, np.uint32)}, "slots must be int32 [M], got uint32 [6]"),
        ({"offsets": np.zeros(0, np.int32)}, "offsets must be int32 [O + 1], got int32 [0]"),
        ({"weights": np.ones(5, np.float32)}, "weights must be float32 [M = 6], got float32 [5]"),
        ({"scale": np.ones(3, np.float32)}, "scale must be float32 [O = 2], got float32 [3]"),
        (
            {"offsets": None, "scale": np.ones(2, np.float32)},
            "scale must be float32 [O = 6], got float32 [2]",
        ),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(wrong, message):
    """A kernel would read beside them."""
    fitting = {
        "table": np.ones((4, 8), np.float32),
        "rows": None,
        "slots": np.zeros(6, np.int32),
        "offsets": np.array([0, 2, 6], np.int32),
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        embedding_bag(**(fitting | wrong))
