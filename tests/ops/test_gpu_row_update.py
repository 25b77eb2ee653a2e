# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of the row update and of pairwise dots in Pallas's interpreter."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse.ops.dot_interaction.cases import SHAPES
from jaxsparse.ops.dot_interaction.gpu import dot_interaction_grads_triton, dot_interaction_triton
from jaxsparse.ops.dot_interaction.reference import dot_interaction_reference
from jaxsparse.ops.row_update import RowTables
from jaxsparse.ops.row_update.cases import CASES, RULES
from jaxsparse.ops.row_update.gpu import count_not_finite_triton, row_update_triton
from jaxsparse.ops.row_update.reference import count_not_finite_reference, row_update_reference


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


QUICK_UPDATES = {
    ("rowwise_decay", "odd"),
    ("adagrad_decay", "extremes"),
    ("adam", "bfloat16_extremes"),
}


# Every rule on two cases, every case with one rule.
UPDATES = [
    (rule, name)
    for rule in RULES
    for name in CASES
    if rule != "heavy_ball" and (name in ("odd", "bfloat16_extremes") or rule == "adagrad_decay")
]


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        pytest.param(*pair, marks=() if pair in QUICK_UPDATES else pytest.mark.slow)
        for pair in UPDATES
    ],
)
def test_row_update(rule, name):
    given = CASES[name].arguments(RULES[rule])
    arrays = {key: jax.tree.map(jnp.asarray, x) for key, x in given.items() if key != "rule"}
    rates = arrays.pop("rates")
    noise = arrays["rows"].astype(jnp.uint32)
    arrays["tables"] = RowTables(jnp.zeros((0,), jnp.int32), rates, noise)

    @jax.jit
    def run(arrays, enabled):
        moved = row_update_triton(given["rule"], 7, **arrays, enabled=enabled, interpret=True)
        return moved, count_not_finite_triton(given["rule"], 7, **arrays, interpret=True)

    (slab, slots), count = run(arrays, jnp.bool_(True))
    with np.errstate(all="ignore"):
        want_slab, want_slots = row_update_reference(**given, seed=7)
        assert int(count) == count_not_finite_reference(**given, seed=7)
    check_moved(given["slab"], slab, want_slab)
    for key, want in want_slots.items():
        check_moved(given["slots"][key], slots[key], want)
    (slab, slots), _ = run(arrays, jnp.bool_(False))
    assert np.asarray(slab).tobytes() == given["slab"].tobytes()
    for key, slot in slots.items():
        assert np.asarray(slot).tobytes() == given["slots"][key].tobytes()


def check_moved(old, new, want):
    """Within the rounding of a step's terms; a bfloat16 may fall to the other side now and then."""
    new = np.asarray(new)
    assert new.dtype == want.dtype
    if new.dtype.itemsize == 2:
        assert (new.view(np.uint16) == want.view(np.uint16)).mean() > 0.99
        return
    np.testing.assert_array_equal(np.isfinite(new), np.isfinite(want))
    old, new, want = (array.astype(np.float64)[np.isfinite(want)] for array in (old, new, want))
    size = np.maximum(np.abs(old), np.abs(want)) + np.abs(want - old)
    assert (np.abs(new - want) <= 2e-6 * size + 1e-38).all()


def test_rates_and_noise_of_tables(devices):
    """Several tables in one slab, cut over devices, in a `shard_map`."""
    rng = np.random.default_rng(0)
    mesh = js.make_mesh(devices=devices[:2])
    slab = rng.normal(size=(2 * 12, 3)).astype(np.float32)
    rows = np.array([1, 5, 7, 12, 0, 3, 4, 11], np.int32)
    grads = rng.normal(size=(8, 3)).astype(np.float32)
    starts = jnp.array([0, 5], jnp.int32)
    tables = RowTables(starts, jnp.float32([0.5, 0.25]), jnp.zeros(2, jnp.uint32))
    rule = js.SGD(0.1)

    def update(slab, rows, grads):
        step, enabled = jnp.int32(0), jnp.bool_(True)
        args = slab, {}, rows, grads, tables, step, enabled
        return row_update_triton(rule, 0, *args, interpret=True)[0]

    cut = P("shard")
    sharded = jax.shard_map(
        update, mesh=mesh, in_specs=(cut, cut, cut), out_specs=cut, check_vma=False
    )
    got = np.asarray(jax.jit(sharded)(slab, rows, grads))
    want = slab.copy()
    for entry, row in enumerate(rows):
        if row < 12:
            rate = 0.5 if row < 5 else 0.25
            want[row + 12 * (entry // 4)] -= rate * grads[entry]
    np.testing.assert_allclose(got, want, rtol=1e-6)


# ---- pairwise dots ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [n if n == "odd" else pytest.param(n, marks=pytest.mark.slow) for n in SHAPES]
)
def test_dot_interaction(name):
    num_samples, num_vectors, dim = SHAPES[name]
    rng = np.random.default_rng(0)
    shape = (num_vectors, num_samples, dim)
    vectors = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32))
    pairs = num_vectors * (num_vectors - 1) // 2
    grads = jnp.asarray(rng.normal(size=(num_samples, pairs)), jnp.float32)
    want, pull_back = jax.vjp(dot_interaction_reference, vectors)
    (want_grads,) = pull_back(grads)
    got = jax.jit(partial(dot_interaction_triton, interpret=True))(vectors)
    got_grads = jax.jit(partial(dot_interaction_grads_triton, interpret=True))(grads, vectors)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)
    for one, expected in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=2e-5)
