# SPDX-License-Identifier: Apache-2.0
"""The contracts of `EmbeddingCollection`, one by one; `test_exactness.py` crosses the options."""

from __future__ import annotations

import dataclasses
import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse import specs
from jaxsparse.testing import assert_trees_equal, count_compiles
from tests import oracle

USERS, ITEMS = 3_000, 500


def make_specs(optimizer=None, **item_fields):
    """Two slabs that travel and a frozen one; ``clicked`` has weights."""
    optimizer = js.Adagrad(0.25) if optimizer is None else optimizer
    item_fields = {"placement": "sharded", "optimizer": optimizer, **item_fields}
    item = js.TableSpec("item", vocabulary_size=ITEMS, embedding_dim=4, **item_fields)
    user = js.TableSpec("user", vocabulary_size=USERS, embedding_dim=3, optimizer=js.SGD(0.5))
    fixed = js.TableSpec("fixed", vocabulary_size=20, embedding_dim=4, trainable=False)
    return [
        js.FeatureSpec("shown", item),
        js.FeatureSpec("clicked", item, combiner="mean", max_length=4, truncate="tail"),
        js.FeatureSpec("user", user, combiner="sqrtn", padding_id=-1),
        js.FeatureSpec("history", item, combiner=None, max_length=3),
        js.FeatureSpec("fixed", fixed),
    ]


def make(devices, optimizer=None, exchange=None, only=None, **item_fields):
    """A collection over the first ``devices``, or over ``(nodes, per_node)``.

    ``only`` names the features to keep: fewer slabs compile sooner.
    """
    nodes, size = devices if isinstance(devices, tuple) else (None, devices)
    mesh = js.make_mesh(nodes, jax.devices()[: size * (nodes or 1)])
    features = make_specs(optimizer, **item_fields)
    features = [f for f in features if only is None or f.name in only]
    exchange = js.Exchange() if exchange is None else exchange
    return js.EmbeddingCollection(features, mesh=mesh, exchange=exchange)


BAGS = ("shown", "clicked")
"""The features of the smaller collections: one slab, with weights."""


def make_features(seed, samples=8, only=None):
    """Bags of the same lengths for every seed, so that one program serves them."""
    rng = np.random.default_rng(seed)
    lengths = np.resize([1, 0, 4, 4], samples)
    num_clicked = int(lengths.sum())
    user = rng.integers(0, USERS, (samples, 4))
    user[1::4] = -1
    features = {
        "shown": rng.integers(0, ITEMS, samples),
        "clicked": js.Ragged.from_lengths(
            rng.integers(0, ITEMS, num_clicked), lengths, rng.integers(1, 4, num_clicked) / 2
        ),
        "user": user,
        "history": js.Ragged.from_lengths(rng.integers(0, ITEMS, 2 * samples), np.full(samples, 2)),
        "fixed": rng.integers(0, 20, samples),
    }
    return {name: value for name, value in features.items() if only is None or name in only}


def dyadic_grads(acts, seed):
    """Gradients k/64, whose sums are exact in any order."""
    rng = np.random.default_rng(seed)
    return {n: (rng.integers(-32, 33, a.shape) / 64).astype(np.float32) for n, a in acts.items()}


def snapshot(state):
    """Copies of all leaves, which outlive a donation."""
    return jax.tree.map(np.array, state)


@pytest.fixture(scope="module")
def emb(devices_of_module):
    return make(4)


@pytest.fixture(scope="module")
def devices_of_module():
    assert len(jax.devices()) == 8


RUNG = 16
"""Holds every batch of this file, so that they share programs."""


# ---- the state --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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


# ---- sparse gradients -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "placement"),
    [(1, "sharded"), (4, "replicated"), ((2, 2), "sharded"), ((2, 2), "single")],
    ids=str,
)
def test_two_merged_batches_are_one_large_batch(devices, placement):
    emb = make(devices, only=BAGS, placement=placement)
    first, second = make_features(0, only=BAGS), make_features(1, only=BAGS)
    both = {
        name: js.Ragged.concatenate([first[name], second[name]])
        if isinstance(first[name], js.Ragged)
        else np.concatenate([first[name], second[name]])
        for name in first
    }
    state = emb.init(jax.random.key(0))
    parts, all_grads = [], []
    for seed, features in enumerate((first, second)):
        acts, residuals = emb.lookup(state, emb.pack(features, rung=27))
        all_grads.append(dyadic_grads(acts, seed))
        parts.append(emb.row_grads(residuals, all_grads[-1]))
    acts, residuals = emb.lookup(state, emb.pack(both))
    grads = {name: np.concatenate([g[name] for g in all_grads]) for name in acts}
    merged = js.merge_row_grads(*parts)
    large = emb.row_grads(residuals, grads)
    np.testing.assert_allclose(js.row_grads_norm(merged), js.row_grads_norm(large), rtol=1e-6)
    got = snapshot(emb.apply(state, merged, step=0))
    want = snapshot(emb.apply(emb.init(jax.random.key(0)), large, step=0))
    # Sums of dyadic gradients are exact, so even Adagrad's rows agree to the bit.
    assert_trees_equal(got, want)


def sparse_oracle(emb, state, features):
    """An `OracleCollection` of the same rows, and its batch."""
    tables = {
        name: {
            "dim": spec.embedding_dim,
            "rule": "sgd",
            "learning_rate": 1.0,
            "trainable": spec.trainable,
            "rows": dict(enumerate(emb.read(state, name, np.arange(spec.vocabulary_size)))),
        }
        for name, spec in emb.tables.items()
    }
    described = [
        {
            "name": spec.name,
            "table": spec.table.name,
            "combiner": spec.combiner,
            "max_length": spec.max_length,
            "truncate": spec.truncate,
            "padding_id": spec.padding_id,
        }
        for spec in emb.features
    ]
    batch = {}
    for name, value in features.items():
        if not isinstance(value, js.Ragged):
            batch[name] = np.reshape(value, (len(value), -1)).tolist()
            continue
        bags = [bag.tolist() for bag in value]
        batch[name] = bags
        if value.weights is not None:
            splits = np.split(value.weights, value.row_splits[1:-1])
            batch[name] = (bags, [part.tolist() for part in splits])
    return oracle.OracleCollection(tables, described), batch


@pytest.mark.parametrize("devices", [1, 4], ids=str)
def test_norm_equals_the_oracles(devices):
    only = (*BAGS, "fixed")
    emb = make(devices, only=only, placement="replicated")
    state, features = emb.init(jax.random.key(0)), make_features(0, only=only)
    judge, batch = sparse_oracle(emb, state, features)
    acts, residuals = emb.lookup(state, emb.pack(features))
    grads = jax.tree.map(lambda a: np.asarray(a) + 1, acts)
    found = judge.row_grads(batch, grads)
    trained = [g for name, rows in found.items() if name != "fixed" for g, _ in rows.values()]
    want = np.sqrt(sum(np.sum(g**2) for g in trained))
    row_grads = emb.row_grads(residuals, grads)
    np.testing.assert_allclose(js.row_grads_norm(row_grads), want, rtol=1e-6)
    halved = js.scale_row_grads(row_grads, 0.5)
    np.testing.assert_allclose(js.row_grads_norm(halved), want / 2, rtol=1e-6)


def test_row_grads_hold_each_row_once(emb):
    state, features = emb.init(jax.random.key(0)), make_features(0)
    features["shown"][:] = 7
    acts, residuals = emb.lookup(state, emb.pack(features, rung=RUNG))
    row_grads = emb.row_grads(residuals, acts)
    for rows, num_rows in zip(row_grads.rows, row_grads.num_rows, strict=True):
        for shard in rows.addressable_shards:
            real = np.asarray(shard.data)
            real = real[real < num_rows]
            assert np.unique(real).size == real.size


# ---- gradients of weights ---------------------------------------------------------------------


def test_weight_grads_come_in_the_users_order(emb):
    features = make_features(0)
    rng = np.random.default_rng(1)
    lengths = [6, 0, 1, 4, 5, 2, 0, 3]  # longer than max_length=4: the head is cut off
    total = sum(lengths)
    features["clicked"] = js.Ragged.from_lengths(
        rng.integers(0, ITEMS, total), lengths, rng.normal(size=total)
    )
    state = emb.init(jax.random.key(0))
    judge, batch = sparse_oracle(emb, state, features)
    acts, residuals = emb.lookup(state, emb.pack(features))
    grads = {n: rng.normal(size=a.shape).astype(np.float32) for n, a in acts.items()}
    got = emb.weight_grads(residuals, grads)
    want, absolute = judge.weight_grads(batch, grads)["clicked"]
    assert got.keys() == {"clicked"} and got["clicked"].shape == (total,)
    oracle.assert_scaled(got["clicked"], want, absolute)
    assert not np.asarray(got["clicked"])[:2].any(), "values cut off have no gradient"
    after = emb.weight_grads(residuals, grads)
    state = emb.update(state, residuals, grads, step=0)
    assert_trees_equal(after, emb.weight_grads(residuals, grads))


def test_weight_grads_skip_padding(devices):
    item = js.TableSpec("item", vocabulary_size=9, embedding_dim=2, placement="sharded")
    feature = js.FeatureSpec("bag", item, padding_id=-1)
    emb = js.EmbeddingCollection([feature], mesh=js.make_mesh(devices=devices[:2]))
    state = emb.write(emb.init(jax.random.key(0)), "item", [1, 2], [[1, 2], [3, 4]])
    bags = js.Ragged.from_lists([[-1, 2], [1, -1]], weights=[[5.0, 1.0], [1.0, 7.0]])
    _, residuals = emb.lookup(state, emb.pack({"bag": bags}))
    grads = {"bag": np.float32([[1, 0], [1, 1]])}
    assert emb.weight_grads(residuals, grads)["bag"].tolist() == [0, 3, 3, 0]


def test_weight_grads_of_padding_alone(devices):
    item = js.TableSpec("item", vocabulary_size=9, embedding_dim=2)
    feature = js.FeatureSpec("bag", item, padding_id=-1)
    emb = js.EmbeddingCollection([feature], mesh=js.make_mesh(devices=devices[:1]))
    bags = js.Ragged.from_lists([[-1], [-1, -1]], weights=[[5.0], [1.0, 7.0]])
    acts, residuals = emb.lookup(emb.init(jax.random.key(0)), emb.pack({"bag": bags}))
    assert emb.weight_grads(residuals, acts)["bag"].tolist() == [0, 0, 0]


def test_weight_grads_are_central_differences(emb):
    features, state = make_features(0), emb.init(jax.random.key(0))
    clicked = features["clicked"]
    ids = emb.pack(features, rung=RUNG)
    acts, residuals = emb.lookup(state, ids)
    grads = dyadic_grads(acts, 0)
    got = np.asarray(emb.weight_grads(residuals, grads)["clicked"])

    def loss(weights):
        bag = js.Ragged(clicked.values, clicked.row_splits, weights)
        acts, _ = emb.lookup(state, emb.pack({**features, "clicked": bag}, rung=RUNG))
        return np.sum(np.asarray(acts["clicked"], np.float64) * grads["clicked"])

    for index in range(0, clicked.values.size, 3):
        step = np.zeros(clicked.values.size, np.float32)
        step[index] = 0.5
        difference = loss(clicked.weights + step) - loss(clicked.weights - step)
        np.testing.assert_allclose(got[index], difference, rtol=1e-4, atol=1e-6)


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
