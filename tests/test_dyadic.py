# SPDX-License-Identifier: Apache-2.0
"""SGD on dyadic numbers, to the bit: one collection, every placement, combiner and form of input.

Rows and gradients are k/64, weights k/2, bags hold 0, 1, 4 or 16 ids and the learning rate is a
power of two, so every sum is exact in float32 in whatever order it is taken (`assert_exact` checks
that) and a lost, doubled or rescaled id cannot hide behind a tolerance. Whole tables are compared,
rows of no id included. The inputs are the same on all meshes, and so must the results be.
"""

from __future__ import annotations

import itertools
from functools import cache, partial

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

import jaxsparse as js
from tests import oracle
from tests.combinations import PROGRAM, SKEWS, make_mesh

SEED = 3
MESHES = PROGRAM["mesh"]
FAST = ("1", "2x2")
TABLES = {
    "sharded": ((70_001, 4), (300, 8)),
    "replicated": ((300, 8), (500, 5)),
    "single": ((66_000, 4), (1_000, 5)),
}
"""Rows and dim of the tables of each placement; six features share each."""
COMBINERS = {"sum": 1.0, "mean": 1 / 16, "sqrtn": 1 / 4, None: 1.0}
"""And the smallest number each multiplies a sum by."""
FORMS = ("fixed", "ragged", "weighted")
LENGTHS = (0, 1, 4, 16)
WIDTH = 16
PADDING = 999_999_999
RATE = 0.25
SAMPLES = 16
ROW_UNIT = RATE * 2.0**-11
"""All rows are multiples: a gradient is of 1/64, a weight of 1/2, a combiner's factor of 1/16."""


# ---- specs ------------------------------------------------------------------------------------


def make_tables():
    return {
        f"{placement}{i}": js.TableSpec(
            f"{placement}{i}",
            vocabulary_size=size,
            embedding_dim=dim,
            optimizer=js.SGD(RATE),
            placement=placement,
        )
        for placement, sizes in TABLES.items()
        for i, (size, dim) in enumerate(sizes)
    }


def make_features():
    """Every placement with every combiner and form; the tables of a placement take turns."""
    tables = make_tables()
    features = []
    for placement in TABLES:
        for i, (combiner, form) in enumerate(itertools.product(COMBINERS, FORMS)):
            features.append(
                js.FeatureSpec(
                    f"{placement}_{combiner}_{form}",
                    tables[f"{placement}{i % 2}"],
                    combiner=combiner,
                    max_length=None if combiner else WIDTH,
                    padding_id=PADDING,
                )
            )
    return features


@cache
def make_collection(mesh):
    return js.EmbeddingCollection(make_features(), mesh=make_mesh(mesh))


def locate(emb, table, rows):
    """Slab, its index, and places of a table's rows in each copy of the slab."""
    slab, index = emb.layout.find(table)
    shard, local_row = slab.tables[index].locate(rows, emb.num_shards)
    return slab, emb.layout.slabs.index(slab), shard, shard * slab.rows_per_shard + local_row


# ---- inputs, the same on all meshes -----------------------------------------------------------


@cache
def one_shard(table, size):
    """Rows that share a shard, on every mesh."""
    rows = np.arange(size)
    shards = np.stack([locate(make_collection(mesh), table, rows)[2] for mesh in MESHES])
    _, groups, counts = np.unique(shards, axis=1, return_inverse=True, return_counts=True)
    return rows[groups.reshape(-1) == counts.argmax()]


def draw_keys(rng, table, skew, count):
    size = table.vocabulary_size
    if skew == "uniform":
        return rng.integers(0, size, count)
    if skew == "zipf":
        return (rng.zipf(1.3, count) - 1) % size
    if skew == "one_row":
        return np.full(count, size - 1)
    return rng.choice(one_shard(table.name, size), count)


def make_feature_batch(rng, feature, skew):
    """What `pack` takes and what the oracle takes: bags of LENGTHS keys, with padding between.

    Lengths come from the feature's name alone: all steps share a compiled program.
    """
    form = feature.name.rsplit("_", 1)[1]
    shapes = np.random.default_rng(list(feature.name.encode()))
    real = shapes.choice(LENGTHS, SAMPLES)
    holes = WIDTH - real if form == "fixed" else np.minimum(shapes.integers(0, 3), WIDTH - real)
    bags = []
    for length, missing in zip(real, holes, strict=True):
        bag = np.full(length + missing, PADDING)
        at = shapes.permutation(length + missing)[:length]
        bag[at] = draw_keys(rng, feature.table, skew, length)
        bags.append(bag)
    lists = [bag.tolist() for bag in bags]
    if form == "fixed":
        return np.stack(bags), lists
    if form == "ragged":
        return js.Ragged.from_lists(lists), lists
    weights = [rng.choice([-1.0, 0.0, 0.5, 1.0, 1.5], len(bag)).tolist() for bag in lists]
    return js.Ragged.from_lists(lists, weights), (lists, weights)


def make_step(rng, skew):
    """Features for `pack`, the oracle's batch, and gradients, of one step."""
    features, batch, grads = {}, {}, {}
    for feature in make_features():
        features[feature.name], batch[feature.name] = make_feature_batch(rng, feature, skew)
        bag = () if feature.combiner else (WIDTH,)
        shape = (SAMPLES, *bag, feature.table.embedding_dim)
        grads[feature.name] = (rng.integers(-24, 25, shape) / 64).astype(np.float32)
    return features, batch, grads


# ---- the oracle's results ---------------------------------------------------------------------


def assert_exact(absolute, unit):
    """Sums of multiples of ``unit`` whose absolute terms add up to ``absolute`` fit float32."""
    assert np.max(absolute, initial=0) <= 2**24 * unit


@cache
def expected():
    """Tables at first, steps, and the oracle's activations and tables after each step."""
    rng = np.random.default_rng(SEED)
    specs = make_tables()
    start = {
        name: (rng.integers(-64, 65, (t.vocabulary_size, t.embedding_dim)) / 64).astype(np.float32)
        for name, t in specs.items()
    }
    steps = [make_step(rng, skew) for skew in SKEWS]
    judge = oracle.OracleCollection(
        {
            name: {
                "dim": spec.embedding_dim,
                "rows": dict(enumerate(start[name].astype(np.float64))),
                "rule": "sgd",
                "learning_rate": RATE,
            }
            for name, spec in specs.items()
        },
        [
            {
                "name": f.name,
                "table": f.table.name,
                "combiner": f.combiner,
                "max_length": f.max_length,
                "padding_id": PADDING,
            }
            for f in make_features()
        ],
    )
    return start, steps, [expected_step(judge, *step, i) for i, step in enumerate(steps)]


def expected_step(judge, _, batch, grads, step):
    acts = {}
    for feature in judge.features:
        acts[feature["name"]], absolute = judge.lookup(batch)[feature["name"]]
        assert_exact(absolute, ROW_UNIT / 2 * COMBINERS[feature["combiner"]])
    for found in judge.row_grads(batch, grads).values():
        assert_exact([absolute for _, absolute in found.values()], 2.0**-11)
    sizes = judge.update(batch, grads, step)
    assert all(any(moves.values()) for moves in sizes.values())
    tables = {}
    for name, rows in judge.rows.items():
        tables[name] = np.stack(list(rows.values()))
        assert_exact(np.abs(tables[name]), ROW_UNIT)
    return bits(acts), bits(tables)


def bits(arrays):
    """Bytes as float32; -0.0 counts as 0.0, which is all an order of summation may change."""
    return {
        name: (np.asarray(x, np.float32) + np.float32(0)).tobytes() for name, x in arrays.items()
    }


# ---- the package's results --------------------------------------------------------------------


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_step(emb, state, ids, grads, step):
    acts, residuals = emb.lookup(state, ids)
    return acts, emb.update(state, residuals, grads, step=step)


def make_state(emb, tables):
    slabs = []
    for slab in emb.layout.slabs:
        copies = 1 if slab.replicated else emb.num_shards
        slabs.append(np.zeros((slab.rows_per_shard * copies, slab.dim), np.float32))
    for name, rows in tables.items():
        _, index, _, places = locate(emb, name, np.arange(len(rows)))
        slabs[index][places] = rows
    rates = {name: np.float32(RATE) for name in tables}
    state = js.EmbeddingState(tuple(slabs), ({},) * len(slabs), rates, emb.layout_fingerprint)
    shardings = jax.tree.map(lambda spec: NamedSharding(emb.mesh, spec), emb.state_spec())
    return jax.device_put(state, shardings)


def read_tables(emb, state):
    """Whole tables by name; of a replicated one every device's copy must agree."""
    for slab, array in zip(emb.layout.slabs, state.slabs, strict=True):
        if slab.replicated:
            assert (
                len({np.asarray(shard.data).tobytes() for shard in array.addressable_shards}) == 1
            )
    slabs = [np.asarray(slab) for slab in state.slabs]
    tables = {}
    for name, spec in emb.tables.items():
        _, index, _, places = locate(emb, name, np.arange(spec.vocabulary_size))
        tables[name] = slabs[index][places]
    return tables


@cache
def results(mesh):
    """Bits of activations and tables after each step."""
    emb = make_collection(mesh)
    start, steps, _ = expected()
    state = make_state(emb, start)
    rung = max(emb.pack(features).need for features, _, _ in steps)
    found = []
    for step, (features, _, grads) in enumerate(steps):
        ids = emb.pack(features, rung=rung)
        padded = {}
        for name, grad in grads.items():
            # Samples that only fill up the last device must not reach any row.
            padded[name] = np.full((ids.padded_samples, *grad.shape[1:]), np.nan, np.float32)
            padded[name][:SAMPLES] = grad
        acts, state = train_step(emb, state, ids, padded, np.int32(step))
        acts = {name: np.asarray(values)[:SAMPLES] for name, values in acts.items()}
        found.append((bits(acts), bits(read_tables(emb, state))))
    return found


# ---- tests ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mesh", [pytest.param(m, marks=() if m in FAST else pytest.mark.slow) for m in MESHES]
)
def test_sgd_of_dyadic_numbers_equals_the_oracle_bitwise(mesh, devices):
    for skew, got, want in zip(SKEWS, results(mesh), expected()[2], strict=True):
        for what, got_bits, want_bits in zip(("activations", "table"), got, want, strict=True):
            assert got_bits.keys() == want_bits.keys()
            wrong = [name for name in want_bits if got_bits[name] != want_bits[name]]
            assert not wrong, f"{what} of {wrong} differ at step {skew!r} on mesh {mesh!r}"


@pytest.mark.slow
def test_all_meshes_give_the_same_bits(devices):
    assert all(results(mesh) == results(MESHES[0]) for mesh in MESHES)


def test_the_collection_has_every_option():
    emb = make_collection("1")
    assert {t.placement for t in emb.tables.values()} == {"sharded", "replicated", "single"}
    assert all(t.trainable and t.dtype == "float32" for t in emb.tables.values())
    assert len({t.embedding_dim for t in emb.tables.values()}) == 3
    assert max(t.vocabulary_size for t in emb.tables.values()) > 2**16
    assert len(emb.features) == len(TABLES) * len(COMBINERS) * len(FORMS)
    for options in itertools.product(TABLES, COMBINERS, FORMS):
        assert "_".join(map(str, options)) in emb.feature_specs
