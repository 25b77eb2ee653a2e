# SPDX-License-Identifier: Apache-2.0
"""Programs of a collection: at other learning rates, inside the user's own, over a narrow wire."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse import specs
from jaxsparse.testing import assert_trees_equal, count_compiles
from tests.five_features import BAGS, RUNG, dyadic_grads, make, make_features


@pytest.fixture(scope="module")
def emb(devices):
    return make(4)


# ---- learning rates ---------------------------------------------------------------------------


def make_sgd(rate):
    return make(2, js.SGD(rate), only=("shown",))


def item_step(emb, state, step=0):
    """How far one update moves a row shown 8 times, each time with gradient 1."""
    ids = emb.pack({"shown": np.zeros(8, int)})
    acts, residuals = emb.lookup(state, ids)
    grads = {"shown": np.ones(acts["shown"].shape, np.float32)}
    before = emb.read(state, "item", [0])
    state = emb.update(state, residuals, grads, step=step)
    return state, float((before - emb.read(state, "item", [0]))[0, 0])


def test_another_rate_compiles_nothing(devices):
    emb = make_sgd(0.25)
    state, moved = item_step(emb, emb.init(jax.random.key(0)))
    np.testing.assert_allclose(moved, 8 * 0.25, rtol=1e-5)
    with count_compiles() as count:
        for rate in (0.5, 0.125, 1.0, 2.0, 0.0):
            state, moved = item_step(emb, state.with_learning_rate("item", rate))
            np.testing.assert_allclose(moved, 8 * rate, rtol=1e-5)
    assert count.programs == 0


def test_collections_that_differ_in_a_rate_share_programs(devices):
    one, other = make_sgd(0.25), make_sgd(0.5)
    assert one == other and hash(one) == hash(other)
    _, moved = item_step(one, one.init(jax.random.key(0)))
    with count_compiles() as count:
        _, moved_more = item_step(other, other.init(jax.random.key(0)))
    assert count.programs == 0
    np.testing.assert_allclose([moved, moved_more], [2.0, 4.0], rtol=1e-5)


def schedule_of(rate):
    return lambda step: rate * (step + 1)


def test_schedules_are_not_confused(devices):
    # Two closures of one factory look alike; only their identity tells them apart.
    one, other = make_sgd(schedule_of(0.25)), make_sgd(schedule_of(0.5))
    assert one != other
    state, moved = item_step(one, one.init(jax.random.key(0)), step=0)
    _, moved_later = item_step(one, state, step=2)
    _, moved_other = item_step(other, other.init(jax.random.key(0)), step=0)
    np.testing.assert_allclose([moved, moved_later, moved_other], [2, 6, 4], rtol=1e-5)


def test_a_rate_beside_a_schedule_is_a_factor(devices):
    emb = make_sgd(schedule_of(0.25))
    state = emb.init(jax.random.key(0))
    assert float(state.learning_rates["item"]) == 1.0
    _, moved = item_step(emb, state.with_learning_rate("item", 0.5), step=1)
    np.testing.assert_allclose(moved, 8 * 0.25, rtol=1e-5)


# ---- use inside the user's own programs -------------------------------------------------------


def eager_step(emb, features):
    state = emb.init(jax.random.key(0))
    acts, residuals = emb.lookup(state, emb.pack(features))
    return acts, emb.update(state, residuals, dyadic_grads(acts, 0), step=0)


def test_inside_the_users_jit(emb):
    @jax.jit
    def train(state, ids, grads):
        acts, residuals = emb.lookup(state, ids)
        merged = emb.row_grads(residuals, grads)
        norm = js.row_grads_norm(merged)
        return acts, emb.apply(state, merged, step=0), norm

    state = emb.init(jax.random.key(0))
    ids = emb.pack(make_features(0), rung=RUNG)
    acts, residuals = emb.lookup(state, ids)
    want = emb.update(state, residuals, dyadic_grads(acts, 0), step=0)
    got_acts, got, norm = train(emb.init(jax.random.key(0)), ids, dyadic_grads(acts, 0))
    assert_trees_equal(got_acts, acts)
    assert_trees_equal(got, want)
    assert norm > 0
    with count_compiles() as count:
        ids = emb.pack(make_features(9), rung=RUNG)
        train(emb.init(jax.random.key(0)), ids, dyadic_grads(acts, 0))
    assert count.programs == 0


def test_a_jit_is_never_run_with_another_rung(devices):
    emb = make(4, only=BAGS)
    lookup = jax.jit(lambda state, ids: emb.lookup(state, ids)[0])
    state = emb.init(jax.random.key(0))
    features = make_features(0, only=BAGS)
    want = lookup(state, emb.pack(features, rung=RUNG))
    assert_trees_equal(lookup(state, emb.pack(features, rung=RUNG + 1)), want)


@pytest.mark.parametrize("devices", [1, (2, 2)], ids=str)
@pytest.mark.parametrize("placement", ["sharded", "replicated"])
def test_inside_the_users_shard_map(devices, placement):
    emb = make(devices, only=BAGS, placement=placement)
    features = make_features(0, only=BAGS)
    acts, want = eager_step(emb, features)
    state, ids = emb.init(jax.random.key(0)), emb.pack(features)
    cut = P(emb.axes)

    def local(state, ids, grads, step):
        acts, residuals = emb.local.lookup(state, ids)
        row_grads = emb.local.row_grads(residuals, grads)
        # The gradient twice, then half of it: merging inside is exact here.
        twice = js.merge_row_grads(row_grads, row_grads)
        norm = js.row_grads_norm(row_grads)
        state = emb.local.apply(state, js.scale_row_grads(twice, 0.5), step)
        return acts, norm, state

    spec = emb.state_spec()
    step = jax.shard_map(
        local,
        mesh=emb.mesh,
        in_specs=(spec, emb.ids_spec(ids), cut, P()),
        out_specs=(cut, P(), spec),
        check_vma=False,
    )
    got_acts, norm, got = jax.jit(step)(state, ids, dyadic_grads(acts, 0), jnp.int32(0))
    assert_trees_equal(got_acts, acts)
    assert_trees_equal(got, want)
    _, residuals = emb.lookup(state, ids)
    outside = js.row_grads_norm(emb.row_grads(residuals, dyadic_grads(acts, 0)))
    np.testing.assert_allclose(norm, outside, rtol=1e-6)


def test_collections_are_static_arguments(emb):
    again = make(4)
    assert emb == again and hash(emb) == hash(again) and emb is not again
    assert emb != make(4, exchange=js.Exchange(capacity=RUNG))
    assert emb != make((2, 2)) and emb != make(2) and emb != "emb"


# ---- the wire ---------------------------------------------------------------------------------


def test_wire_dtypes(devices):
    features = make_features(0, only=BAGS)

    def step(wire_dtype):
        return eager_step(make(4, only=BAGS, exchange=js.Exchange(wire_dtype=wire_dtype)), features)

    acts, want = step(None)
    assert_trees_equal(step("float32"), (acts, want))
    got_acts, got = step(jnp.bfloat16)
    for name in acts:
        np.testing.assert_allclose(got_acts[name], acts[name], rtol=0.05, atol=2e-3)
    assert not np.array_equal(got_acts["clicked"], acts["clicked"])
    for got_leaf, leaf in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert got_leaf.dtype == leaf.dtype
        np.testing.assert_allclose(got_leaf, leaf, rtol=0.05, atol=0.01)


def test_a_narrow_wire_says_that_it_is_not_exact():
    field = inspect.getsource(specs.Exchange).split("wire_dtype: Any = None")[1]
    assert "gives up exactness" in field


@pytest.mark.parametrize("num_devices", [1, 4])
def test_gradients_that_know_no_activation_copy_no_table(num_devices, devices):
    """Then nothing but the rows orders the update behind the lookup, in one program of the user."""
    table = js.TableSpec("t", vocabulary_size=40_000, embedding_dim=16, placement="sharded")
    mesh = js.make_mesh(devices=devices[:num_devices])
    emb = js.EmbeddingCollection([js.FeatureSpec("f", table)], mesh=mesh)

    def step(state, ids):
        acts, residuals = emb.lookup(state, ids)
        ones = jax.tree.map(jnp.ones_like, acts)
        return emb.update(state, residuals, ones, step=0), acts

    state, ids = emb.init(jax.random.key(0)), emb.pack({"f": np.arange(16)})
    compiled = jax.jit(step, donate_argnums=0).lower(state, ids).compile()
    assert " copy(" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < state.slabs[0].nbytes / num_devices / 10
