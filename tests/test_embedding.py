# SPDX-License-Identifier: Apache-2.0
"""The contracts of `EmbeddingCollection`, one by one; `test_exactness.py` crosses the options."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse.testing import assert_trees_equal, count_compiles
from tests.five_features import BAGS, ITEMS, RUNG, make, make_features, snapshot


@pytest.fixture(scope="module")
def emb(devices):
    return make(4)


# ---- the state --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_init_depends_on_key_table_and_row_alone(dtype, devices):
    def rows(devices, placement="sharded", only=("shown",), **table):
        emb = make(devices, only=only, dtype=dtype, placement=placement, **table)
        return emb.read(emb.init(jax.random.key(3)), "item", np.arange(ITEMS)).tobytes()

    want = rows(1)
    itemsize = np.dtype(dtype).itemsize
    found = np.frombuffer(want, f"u{itemsize}").reshape(ITEMS, 4)
    assert np.unique(found, axis=0).shape[0] == ITEMS
    assert rows(8) == want
    assert rows(4, "replicated") == want
    if dtype == "bfloat16":
        return
    assert rows((2, 4)) == want
    assert rows(4, "single") == want
    # Another rule is another slab, and one with other tables beside it.
    assert rows(2, optimizer=js.SGD(0.5), only=("user", "shown")) == want


def test_another_key_or_table_gives_other_rows(emb):
    one, other = emb.init(jax.random.key(0)), emb.init(jax.random.key(1))
    keys = np.arange(20)
    assert not np.isclose(emb.read(one, "item", keys), emb.read(other, "item", keys)).any()
    assert not np.isclose(emb.read(one, "item", keys), emb.read(one, "fixed", keys)).any()


def test_init_places_every_leaf_where_state_spec_says(emb):
    state = emb.init(jax.random.key(0))
    specs_of_leaves = jax.tree.leaves(emb.state_spec(), is_leaf=lambda x: isinstance(x, P))
    for leaf, spec in zip(jax.tree.leaves(state), specs_of_leaves, strict=True):
        assert leaf.sharding.is_equivalent_to(jax.sharding.NamedSharding(emb.mesh, spec), leaf.ndim)
    assert set(state.learning_rates) == {"item", "user"}


def test_initial_slots_are_those_of_the_rule(emb):
    slots = emb.read_slots(emb.init(jax.random.key(0)), "item", [3, 499])
    assert slots.keys() == {"accumulator"}
    np.testing.assert_array_equal(slots["accumulator"], np.full((2, 4), 0.1, np.float32))
    assert emb.read_slots(emb.init(jax.random.key(0)), "fixed", [1]) == {}


# ---- read and write ---------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["sharded", "replicated", "single"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_read(placement, dtype, devices):
    emb = make(4, only=BAGS, placement=placement, dtype=dtype)
    rng = np.random.default_rng(0)
    state = emb.init(jax.random.key(0))
    before = emb.read(state, "item", np.arange(ITEMS))
    slots = emb.read_slots(state, "item", np.arange(ITEMS))
    keys = rng.permutation(ITEMS)[:33]
    rows = rng.integers(-100, 100, (33, 4)) / 64
    rows[0] = [-0.0, 0.0, 1.0, -1.0]
    state = emb.write(state, "item", keys, rows)
    got = emb.read(state, "item", keys)
    assert got.dtype == before.dtype
    assert got.tobytes() == rows.astype(before.dtype).tobytes()
    others = np.setdiff1d(np.arange(ITEMS), keys)
    assert emb.read(state, "item", others).tobytes() == before[others].tobytes()
    assert_trees_equal(emb.read_slots(state, "item", np.arange(ITEMS)), slots)


def test_write_donates_and_leaves_the_users_arrays_alone(emb):
    state = emb.init(jax.random.key(0))
    keys, rows = jnp.arange(3), jnp.ones((3, 4))
    new = emb.write(state, "item", keys, rows)
    index = [slab.tables[0].spec.name for slab in emb.layout.slabs].index("item")
    assert state.slabs[index].is_deleted()
    np.testing.assert_array_equal(emb.read(new, "item", keys), rows)


def test_nothing_is_read_and_written_too(emb):
    state = emb.init(jax.random.key(0))
    none = np.array([], np.int64)
    assert emb.read(state, "item", none).shape == (0, 4)
    assert emb.read_slots(state, "item", none)["accumulator"].shape == (0, 4)
    state = emb.write(state, "item", none, np.zeros((0, 4)))
    assert emb.read(state, "item", [1, 1]).shape == (2, 4), "reading a row twice is no error"


def test_integer_slots_are_read_as_stored(devices):
    emb = make(2, js.Adam(0.25, per_row_count=True), only=("shown",))
    state = emb.init(jax.random.key(0))
    ids = emb.pack(make_features(0, only=("shown",)))
    for step in range(3):
        acts, residuals = emb.lookup(state, ids)
        state = emb.update(state, residuals, acts, step=step)
    shown = make_features(0)["shown"][:1]
    count = emb.read_slots(state, "item", shown)["count"]
    assert count.dtype == np.int32 and count.tolist() == [3]


# ---- pack -------------------------------------------------------------------------------------


def test_lengths_are_those_after_truncation_and_padding(emb):
    clicked = js.Ragged.from_lists([[1, 2, 3, 4, 5, 6], [], [7]])
    user = np.array([[1, -1, 2, -1], [-1, -1, -1, -1], [1, 2, 3, 4]])
    history = js.Ragged.from_lists([[1], [1, 2, 3], []])
    shown = np.array([1, 2, 3])
    ids = emb.pack(
        {"shown": shown, "clicked": clicked, "user": user, "history": history, "fixed": shown}
    )
    assert ids.lengths("clicked").tolist() == [4, 0, 1, 0]
    assert ids.lengths("user").tolist() == [2, 0, 4, 0]
    assert ids.lengths("history").tolist() == [1, 3, 0, 0]
    assert ids.lengths("shown").tolist() == [1, 1, 1, 0]
    assert (ids.num_samples, ids.padded_samples) == (3, 4)


def test_pack_is_pure(emb):
    features = make_features(0)
    features["shown"] = jnp.asarray(features["shown"])
    before = jax.tree.map(np.array, {n: f for n, f in features.items() if n != "clicked"})
    clicked = dataclasses.astuple(features["clicked"])
    assert_trees_equal(emb.pack(features), emb.pack(features))
    after = {name: feature for name, feature in features.items() if name != "clicked"}
    for name in ("shown", "user", "fixed"):
        np.testing.assert_array_equal(after[name], before[name])
    assert_trees_equal(dataclasses.astuple(features["clicked"]), clicked)
    assert not features["shown"].is_deleted()


def test_need_and_rung(emb):
    features = make_features(0)
    ids = emb.pack(features)
    assert 1 <= ids.need <= ids.rung <= 1.25 * ids.need + 1
    assert emb.pack(features, rung=ids.need + 1).rung == ids.need + 1
    assert emb.pack(features, rung=js.Ladder()).need == ids.need
    # Places for more rows than a device has ids are never of use.
    assert emb.pack(features, rung=10**6).rung < 100


def test_fixed_capacity_is_used_as_it_is(devices):
    free = make(2, only=BAGS)
    fixed = make(2, only=BAGS, exchange=js.Exchange(capacity=12))
    features = make_features(0, only=BAGS)
    assert free.pack(features).rung < 12
    assert fixed.pack(features).rung == 12
    got, _ = fixed.lookup(fixed.init(jax.random.key(0)), fixed.pack(features))
    want, _ = free.lookup(free.init(jax.random.key(0)), free.pack(features))
    assert_trees_equal(got, want)


def test_ignored_keys_are_counted(devices):
    emb = make(2, only=("shown",), keys=js.Identity(out_of_range="ignore"))
    features = make_features(0, only=("shown",))
    features["shown"] = np.array([1, ITEMS, -7, 3, 4, 5, 6, 2**40])
    ids = emb.pack(features)
    assert ids.ignored == {"shown": 3}
    acts, _ = emb.lookup(emb.init(jax.random.key(0)), ids)
    assert (np.asarray(acts["shown"]).any(axis=1) == [1, 0, 0, 1, 1, 1, 1, 0]).all()


# ---- update -----------------------------------------------------------------------------------


def test_update_that_is_not_enabled_changes_no_bit(emb):
    state = emb.init(jax.random.key(0))
    state = emb.write(state, "item", [0, 1], np.full((2, 4), -0.0))
    features = make_features(0)
    features["shown"] = np.array([0, 1] * 4)
    acts, residuals = emb.lookup(state, emb.pack(features, rung=RUNG))
    grads = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), acts)
    before = snapshot(state)
    for enabled in (False, jnp.bool_(False)):
        state = emb.update(state, residuals, grads, step=0, enabled=enabled)
        assert_trees_equal(state, before)


def test_eager_update_donates_the_state_and_nothing_else(emb):
    state = emb.init(jax.random.key(0))
    ids = emb.pack(make_features(0), rung=RUNG)
    acts, residuals = emb.lookup(state, ids)
    grads = jax.tree.map(jnp.ones_like, acts)
    new = emb.update(state, residuals, grads, step=0)
    trained = [slab.trainable for slab in emb.layout.slabs]
    gone = [slab.is_deleted() for slab in state.slabs]
    assert gone == [True] * len(gone), "frozen slabs pass through the same donation"
    assert True in trained and False in trained
    for kept in jax.tree.leaves((ids, acts, residuals, grads, new)):
        assert not kept.is_deleted()
    emb.weight_grads(residuals, grads)  # the residuals are still of use


def test_frozen_rows_stay(emb):
    state = emb.init(jax.random.key(0))
    before = emb.read(state, "fixed", np.arange(20))
    acts, residuals = emb.lookup(state, emb.pack(make_features(0), rung=RUNG))
    assert np.asarray(acts["fixed"]).any()
    state = emb.update(state, residuals, acts, step=0)
    assert emb.read(state, "fixed", np.arange(20)).tobytes() == before.tobytes()


def test_traced_step_and_enabled(emb):
    @partial(jax.jit, donate_argnums=0)
    def train(state, ids, step, enabled):
        acts, residuals = emb.lookup(state, ids)
        return emb.update(state, residuals, acts, step=step, enabled=enabled)

    ids = emb.pack(make_features(0), rung=RUNG)
    state = emb.init(jax.random.key(0))
    before = snapshot(state)
    state = train(state, ids, jnp.int32(0), jnp.bool_(False))
    assert_trees_equal(state, before)
    with count_compiles() as count:
        state = train(state, ids, jnp.int32(1), jnp.bool_(True))
    assert count.programs == 0
    assert not np.array_equal(state.slabs[0], before.slabs[0])


# ---- words ------------------------------------------------------------------------------------


def test_summary_names_tables_slabs_and_bytes(emb):
    text = emb.summary()
    assert "5 features on 4 devices, mesh axes ('shard',)" in text
    for table in emb.tables:
        assert table in text
    for slab in emb.layout.slabs:
        assert slab.name in text


def test_residuals_and_states_are_pytrees(emb):
    state = emb.init(jax.random.key(0))
    _, residuals = emb.lookup(state, emb.pack(make_features(0), rung=RUNG))
    for tree in (state, residuals, residuals.ids):
        leaves, structure = jax.tree.flatten(tree)
        assert all(isinstance(leaf, jax.Array) for leaf in leaves)
        assert jax.tree.structure(jax.tree.unflatten(structure, leaves)) == structure
