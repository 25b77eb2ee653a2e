# SPDX-License-Identifier: Apache-2.0
"""Promise 1: every option, on every mesh, gives the float64 oracle's result.

Sums are held to the scaled bound and moved rows to a share of their step (`tests.oracle`); under
SGD dyadic inputs must match bitwise, which no lost or doubled id survives. Untouched rows and
slots keep their bits. The options are a pairwise covering array and seeded random combinations.
`test_dyadic.py` holds SGD to the bit with all placements and combiners in one collection.
"""

from __future__ import annotations

import itertools
import zlib
from contextlib import nullcontext
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxsparse as js
from jaxsparse.addressing import Addressing
from jaxsparse.ladder import rungs
from jaxsparse.moves import ROUNDING_SEED
from jaxsparse.ops.native import library
from jaxsparse.ops.quantize.reference import stochastic_round_bf16_reference
from jaxsparse.testing import assert_trees_equal
from tests import combinations, oracle
from tests.combinations import SKEWS

COVERING_SEED = 8
RANDOM_SEED = 2
COVERING = combinations.covering_programs(COVERING_SEED)
RANDOM = combinations.random_programs(RANDOM_SEED, 30)
NUM_FAST = 7
"""Programs of the covering array that always run."""
XLA_EVERY = 3
"""Of how many programs one also runs without native kernels."""


# ---- one step, two ways to call it ------------------------------------------------------------


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def step_in_jit(emb, state, ids, grads, step):
    acts, residuals = emb.lookup(state, ids)
    weight_grads = emb.weight_grads(residuals, grads)
    return acts, weight_grads, emb.update(state, residuals, grads, step=step)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def step_in_shard_map(emb, state, ids, grads, step):
    cut, whole = PartitionSpec(emb.axes), PartitionSpec()

    def local(state, ids, grads, step):
        acts, residuals = emb.local.lookup(state, ids)
        return acts, emb.local.update(state, residuals, grads, step)

    specs = (emb.state_spec(), emb.ids_spec(ids), cut, whole)
    acts, state = jax.shard_map(
        local, mesh=emb.mesh, in_specs=specs, out_specs=(cut, specs[0]), check_vma=False
    )(state, ids, grads, step)
    return acts, {}, state


STEPS = {"jit": step_in_jit, "shard_map": step_in_shard_map}


# ---- state and inputs -------------------------------------------------------------------------


def make_state(emb, rng, dyadic):
    """Random rows everywhere, those of no id too: nothing may move them."""
    slabs, slots = [], []
    for slab in emb.layout.slabs:
        rows = slab.rows_per_shard * (1 if slab.replicated else emb.num_shards)
        shape = (rows, slab.dim)
        values = rng.integers(-64, 65, shape) / 64 if dyadic else rng.normal(0, 0.3, shape)
        slabs.append(values.astype(slab.dtype))
        new = slab.optimizer.init_slots(1, slab.dim) if slab.trainable else {}
        slots.append(
            {name: np.repeat(np.asarray(slot), rows, axis=0) for name, slot in new.items()}
        )
    rates = {}
    for name, table in emb.tables.items():
        if table.trainable:
            rate = table.optimizer.learning_rate
            rates[name] = np.float32(1.0 if callable(rate) else rate)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(emb.mesh, spec),
        emb.state_spec(),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    return jax.device_put(
        js.EmbeddingState(tuple(slabs), tuple(slots), rates, emb.layout_fingerprint), shardings
    )


def make_grads(rng, case, shapes, padded_samples, dyadic):
    """Gradients of the activations; NaN where there is nothing to pass them on to."""
    grads = {}
    for name, spec in case.emb.feature_specs.items():
        bag = () if spec.combiner else (spec.max_length,)
        shape = (padded_samples, *bag, spec.table.embedding_dim)
        # Leaning to one side: sums that cancel out have no relative accuracy to be tested.
        values = rng.integers(-16, 25, shape) / 64 if dyadic else rng.normal(0.4, 0.5, shape)
        grads[name] = values.astype(np.float32)
        empty = [not any(bag_shape) for bag_shape in shapes[name]]
        grads[name][: len(empty)][empty] = np.nan
        grads[name][len(empty) :] = np.nan
    return grads


# ---- looking at the arrays --------------------------------------------------------------------


class View:
    """The state as plain numpy arrays, found through the layout."""

    def __init__(self, emb, state):
        self.emb = emb
        for array in jax.tree.leaves((state.slabs, state.slots)):
            if array.sharding.is_fully_replicated:
                first, *others = [np.asarray(shard.data) for shard in array.addressable_shards]
                assert all(first.tobytes() == other.tobytes() for other in others)
        self.slabs = [np.array(slab) for slab in state.slabs]
        self.slots = [{n: np.array(s) for n, s in slots.items()} for slots in state.slots]

    def places(self, table, rows):
        """Slab index and places in the global array of a table's rows."""
        slab, index = self.emb.layout.find(table)
        shard, local_row = slab.tables[index].locate(np.asarray(rows), self.emb.num_shards)
        return self.emb.layout.slabs.index(slab), shard * slab.rows_per_shard + local_row

    def rows(self, table, rows):
        slab, places = self.places(table, rows)
        return self.slabs[slab][places].astype(np.float32)

    def row_slots(self, table, rows):
        slab, places = self.places(table, rows)
        return {name: slot[places] for name, slot in self.slots[slab].items()}

    def assert_only_moved(self, before, touched):
        """Bits of all rows and slots but the touched ones are those of ``before``."""
        masks = [np.zeros(slab.shape[0], bool) for slab in self.slabs]
        for table, rows in touched.items():
            slab, places = self.places(table, sorted(rows))
            masks[slab][places] = True
        for mask, now, old in zip(masks, self.slabs, before.slabs, strict=True):
            assert now[~mask].tobytes() == old[~mask].tobytes()
        for mask, now, old in zip(masks, self.slots, before.slots, strict=True):
            for name in now:
                assert now[name][~mask].tobytes() == old[name][~mask].tobytes(), name


class RoundingOracle(oracle.OracleCollection):
    """The oracle with rows rounded to bfloat16 after each update, where the table is: at random,
    by name of the table, position of the row in it and step, and so by nothing of the mesh."""

    def __init__(self, tables, features, rounded):
        super().__init__(tables, features)
        self.rounded = rounded

    def update(self, batch, grads, step):
        sizes = super().update(batch, grads, step)
        for name in self.rounded:
            for key in sizes[name]:
                noise = zlib.crc32(name.encode()) + int(self.rounded[name].position([key])[0])
                row = self.rows[name][key][None].astype(np.float32)
                noise = np.array([noise % 2**32], np.uint32)
                rounded = stochastic_round_bf16_reference(row, noise, ROUNDING_SEED, step)
                self.rows[name][key] = rounded[0].astype(np.float64)
        return sizes


def touched_rows(case, batch):
    """Rows each table looks up, by the oracle's own reading of the batch."""
    touched = {name: set() for name in case.emb.tables}
    for feature in case.emb.features:
        options = combinations.oracle_feature_of(case, feature.name)
        bags, _ = oracle.looked_up(
            batch[feature.name],
            padding_id=-1,
            max_length=options["max_length"],
            truncate=options["truncate"],
            keep_places=feature.combiner is None,
        )
        touched[feature.table.name] |= {id_.key for bag in bags for id_ in bag}
    return touched


def make_oracle(case, batches, view):
    """An oracle that starts from the rows ``view`` shows, as far as ``batches`` touch them."""
    tables = {}
    for name, table in case.oracle_tables.items():
        keys = sorted(set().union(*(touched_rows(case, batch)[name] for batch in batches)))
        rows = view.rows(name, keys).astype(np.float64)
        tables[name] = {**table, "rows": dict(zip(keys, rows, strict=True))}
    features = [combinations.oracle_feature_of(case, name) for name in case.rows]
    rounded = {
        name: Addressing(table.vocabulary_size)
        for name, table in case.emb.tables.items()
        if table.dtype == "bfloat16"
    }
    return RoundingOracle(tables, features, rounded)


# ---- checks -----------------------------------------------------------------------------------


def check_lookup(case, judge, batch, acts, before, bitwise):
    """Activations, from the rows that are there: sums, so the scaled bound."""
    touched = touched_rows(case, batch)
    for name, keys in touched.items():
        keys = sorted(keys)
        rows = before.rows(name, keys).astype(np.float64)
        judge.actual.rows[name] = dict(zip(keys, rows, strict=True))
    for name, (want, absolute) in judge.actual.lookup(batch).items():
        got = np.asarray(acts[name])[: len(want)]
        assert not np.asarray(acts[name])[len(want) :].any(), "padded samples are not zero"
        oracle.assert_scaled(got, want, absolute)
        if name in bitwise:
            np.testing.assert_array_equal(got, want)


def check_weight_grads(judge, batch, grads, got, bitwise):
    want = judge.actual.weight_grads(batch, grads)
    assert set(got) == set(want)
    for name, (values, absolute) in want.items():
        assert not np.asarray(got[name])[len(values) :].any()
        oracle.assert_scaled(np.asarray(got[name])[: len(values)], values, absolute)
        if name in bitwise:
            np.testing.assert_array_equal(np.asarray(got[name])[: len(values)], values)


def check_rows(case, judge, touched, after, num_steps, bitwise):
    """Rows and slots against the oracle's own trajectory."""
    for name, keys in touched.items():
        if not keys:
            continue
        table, keys = case.emb.tables[name], sorted(keys)
        got, want = after.rows(name, keys), judge.read(name, keys)
        if name in bitwise:
            np.testing.assert_array_equal(got, want, err_msg=name)
        elif table.dtype == "bfloat16":
            # A row near the noise's threshold may round to either neighbour, at each step.
            np.testing.assert_allclose(got, want, rtol=num_steps * 2**-7, atol=1e-6)
        else:
            oracle.assert_rows(got, want, judge.travelled(name, keys))
        if not table.trainable:
            assert after.row_slots(name, keys) == {}
            continue
        # FTRL's z holds the row, and so its rounding.
        rtol = 1e-5 if table.dtype == "float32" else num_steps * 2**-6
        for slot, values in judge.read_slots(name, keys).items():
            scale = np.abs(values).max(initial=0)
            got_slot = after.row_slots(name, keys)[slot]
            if got_slot.dtype == np.int32:
                np.testing.assert_array_equal(got_slot, values, err_msg=slot)
            else:
                np.testing.assert_allclose(
                    got_slot, values, rtol=rtol, atol=rtol * scale, err_msg=f"{name} {slot}"
                )


# ---- the test ---------------------------------------------------------------------------------


def choose_rung(name, needs, emb, packed):
    """One capacity for all steps, so that they share a program."""
    need = max(needs)
    top = max(slab.inverse.shape[0] // emb.num_shards for slab in packed.slabs)
    return {"tight": need, "slack": need + max(1, need // 3), "top": max(top, need)}[name]


def run_program(program, seed, dyadic):
    """Trains a program for one step per skew and compares everything at each."""
    levels = program[0]
    mesh = combinations.make_mesh(levels["mesh"])
    case = combinations.build(program, mesh)
    emb, rng = case.emb, np.random.default_rng(seed)
    count = combinations.num_samples(levels, emb.num_shards)
    # Bags keep their shapes and keys change with the skew: one compiled program serves all.
    shapes = {name: combinations.bag_shapes(rng, row, count) for name, row in case.rows.items()}
    batches = [combinations.make_batch(rng, case, shapes, skew) for skew in SKEWS]
    free = [emb.pack(features) for features, _ in batches]
    rung = choose_rung(levels["rung"], [ids.need for ids in free], emb, free[0])
    rng = np.random.default_rng([*seed, dyadic])
    state = make_state(emb, rng, dyadic)
    before = View(emb, state)
    judge = make_oracle(case, [batch for _, batch in batches], before)
    judge.actual = make_oracle(case, [], before)

    def exact(feature):
        row = case.rows[feature]
        return dyadic and row["rule"] == "sgd" and not row["decay"]

    exact_features = set(filter(exact, case.rows))
    exact_tables = {f.table.name for f in emb.features if exact(f.name)}

    for step, (features, batch) in enumerate(batches):
        ids = emb.pack(features, rung=rung)
        grads = make_grads(rng, case, shapes, ids.padded_samples, dyadic)
        acts, weight_grads, state = STEPS[levels["call"]](emb, state, ids, grads, np.int32(step))
        # At first all rows are dyadic, whatever the rule; afterwards only SGD keeps them so.
        summed = {f.name for f in emb.features if f.combiner in ("sum", None)}
        bitwise = {f for f in case.rows if exact(f) or (dyadic and step == 0 and f in summed)}
        check_lookup(case, judge, batch, acts, before, bitwise)
        if levels["call"] == "jit":
            check_weight_grads(judge, batch, grads, weight_grads, exact_features)
        judge.update(batch, grads, step)
        touched = touched_rows(case, batch)
        after = View(emb, state)
        trained = {name: keys for name, keys in touched.items() if emb.tables[name].trainable}
        after.assert_only_moved(before, trained)
        check_rows(case, judge, touched, after, step + 1, exact_tables)
        before = after
    for name, table in emb.tables.items():
        moved = any(size > 0 for size in judge.travel[name].values())
        assert moved == table.trainable, f"{name}: nothing moved, so nothing was tested"


def describe(program):
    names = (*combinations.FACTORS, "dtype", "trainable", "size")
    return " | ".join(" ".join(str(row[name]) for name in names) for row in program)


def parameters():
    for kind, seed, programs in (
        ("covering", COVERING_SEED, COVERING),
        ("random", RANDOM_SEED, RANDOM),
    ):
        for index, program in enumerate(programs):
            fast = kind == "covering" and index < NUM_FAST
            name = f"{kind}-{index}-{program[0]['mesh']}"
            marks = () if fast else (pytest.mark.slow,)
            yield pytest.param(program, [seed, index], nullcontext, id=name, marks=marks)
            if index % XLA_EVERY == 0:
                marks = () if fast and index == 0 else (pytest.mark.slow,)
                case = (program, [seed, index], library.left_out)
                yield pytest.param(*case, id=f"{name}-xla", marks=marks)


@pytest.mark.parametrize(("program", "seed", "kernels"), list(parameters()))
def test_program_equals_oracle(program, seed, kernels, devices):
    print(f"seed {seed}: {describe(program)}")
    with kernels():
        run_program(program, seed, dyadic=True)
        run_program(program, seed, dyadic=False)


# ---- every rung -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mesh", ["2", *(pytest.param(m, marks=pytest.mark.slow) for m in ("4", "2x4"))]
)
def test_every_rung_gives_the_same_bits(mesh, devices):
    item = js.TableSpec(
        "item",
        vocabulary_size=70_001,
        embedding_dim=4,
        optimizer=js.Adagrad(0.25),
        placement="sharded",
    )
    features = [js.FeatureSpec("seen", item), js.FeatureSpec("bag", item, combiner="mean")]
    emb = js.EmbeddingCollection(features, mesh=combinations.make_mesh(mesh))
    rng = np.random.default_rng(5)
    samples = 4 * emb.num_shards
    lengths = np.tile([0, 1, 2, 4], emb.num_shards)
    keys = rng.integers(0, 20, lengths.sum())
    batch = {
        "seen": rng.integers(0, 70_001, samples),
        "bag": js.Ragged.from_lengths(keys, lengths, rng.normal(size=keys.size)),
    }
    grads = {name: rng.normal(size=(samples, 4)).astype(np.float32) for name in ("seen", "bag")}
    chosen = emb.pack(batch)
    top = chosen.slabs[0].inverse.shape[0] // emb.num_shards
    capacities = [c for c in rungs(top) if c >= chosen.need]
    assert capacities[0] == chosen.rung and capacities[-1] == top and len(capacities) > 4
    results = []
    for capacity in capacities:
        state = make_state(emb, np.random.default_rng(6), dyadic=False)
        ids = emb.pack(batch, rung=capacity)
        assert ids.rung == capacity
        acts, weight_grads, state = step_in_jit(emb, state, ids, grads, np.int32(0))
        results.append(jax.tree.map(np.asarray, (acts, weight_grads, state)))
    for capacity, result in zip(capacities, results, strict=True):
        print(f"rung {capacity}")
        assert_trees_equal(result, results[0])


def test_combinations_are_those_promised():
    plain = [row for rows in COVERING for row in rows if is_plain(row)]
    covered = set().union(*map(combinations.pairs_of, plain))
    print(f"covering array: seed {COVERING_SEED}, {len(plain)} combinations")
    print(f"random combinations: seed {RANDOM_SEED}, {len(RANDOM)}")
    assert covered == combinations.all_pairs()
    assert len(plain) == 3 * len(COVERING) == 63
    assert {rows[0]["mesh"] for rows in COVERING[:NUM_FAST]} == set(combinations.PROGRAM["mesh"])


def is_plain(row):
    return row["trainable"] and row["dtype"] == "float32"


@pytest.mark.parametrize("names", [("mesh", "rule"), ("placement", "rule"), ("mesh", "placement")])
def test_every_pair_trains_a_float32_table(names):
    """That its rows move, `run_program` asserts."""
    found = {
        tuple(row[n] for n in names) for rows in COVERING + RANDOM for row in rows if is_plain(row)
    }
    assert found == set(itertools.product(*(combinations.FACTORS[name] for name in names)))


def test_frozen_and_bfloat16_tables_stand_beside_the_others():
    beside = [row for rows in COVERING for row in rows if not is_plain(row)]
    assert any(not is_plain(row) for rows in COVERING[:NUM_FAST] for row in rows)
    for levels in combinations.VEILED:
        rows = [row for row in beside if levels.items() <= row.items()]
        for name in ("rule", "placement"):
            assert {row[name] for row in rows} == set(combinations.FEATURE[name])


def test_random_programs_are_drawn_one_by_one():
    programs = [tuple(row[name] for name in combinations.PROGRAM) for (row,) in RANDOM]
    assert len(RANDOM) == 30 and len(set(programs)) > 20
