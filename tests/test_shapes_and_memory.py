# SPDX-License-Identifier: Apache-2.0
"""Promise 7: a run compiles a handful of programs, and its memory does not grow with steps.

Field cases I01-I07, I09 and I10 (what failed for somebody in other systems) are here too.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxsparse as js
from jaxsparse.ladder import FACTOR, bucket
from jaxsparse.layout import MAX_ROWS_PER_SHARD
from jaxsparse.packing import distinct
from jaxsparse.testing import count_compiles
from tests.combinations import make_mesh

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]

SLOW = pytest.mark.slow

DENSE_OPTIMIZER = optax.sgd(0.01)
"""One for all trainers: optax transformations are equal only to themselves."""


class Sum(nnx.Module):
    """Logit: the sum of all activations times one weight."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones(()))

    def __call__(self, acts, dense, train=False):
        return self.weight * sum(act.sum(axis=range(1, act.ndim)) for act in acts.values())


def make_trainer(mesh, features, **options):
    emb = js.EmbeddingCollection(features, mesh=mesh, **options)
    return js.Trainer(Sum(), emb, optimizer=DENSE_OPTIMIZER)


def table(name="t", rows=1000, dim=4, rule=None, **options):
    options = {"placement": "sharded", **options}
    return js.TableSpec(
        name,
        vocabulary_size=rows,
        embedding_dim=dim,
        optimizer=js.Adagrad(0.05) if rule is None else rule,
        **options,
    )


def ragged(rng, num_ids, num_bags, num_keys=1000):
    """Exactly ``num_ids`` keys in ``num_bags`` bags, some of them empty."""
    inner = np.sort(rng.integers(0, num_ids + 1, num_bags - 1))
    splits = np.concatenate([[0], inner, [num_ids]])
    return js.Ragged(rng.integers(0, num_keys, num_ids), splits)


def batch_of(features, num_samples):
    labels = np.arange(num_samples, dtype=np.float32) % 2
    return js.Batch(features, labels=labels)


# ---- sizes and programs -----------------------------------------------------------------------


def id_buffers(ids):
    """Lengths of the arrays with an entry an id, of a collection of ragged features alone."""
    for slab in ids.slabs:
        assert not slab.fixed
        yield from (slab.inverse.shape[0], slab.bag.shape[0])
        yield from (slab.row_levels[0].shape[0], slab.bag_levels[0].shape[0])
        if slab.weights is not None:
            yield slab.weights.shape[0]
            yield from (slots.shape[0] for slots in slab.value_slots.values())


def run_of_sizes(trainer, sizes, num_samples, weighted=False):
    """Trains one batch of each size; returns how many programs the step needed."""
    rng = np.random.default_rng(0)
    batches = []
    for size in rng.permutation(sizes):
        bags = ragged(rng, size, num_samples)
        if weighted:
            weights = rng.random(size, np.float32)
            bags = js.Ragged(bags.values, bags.row_splits, weights)
        batches.append(batch_of({"f": bags}, num_samples))
    state = trainer.init(jax.random.key(0))
    with count_compiles() as count:
        result = trainer.fit(batches, epochs=1, state=state, progress=False, log_every=1000)
    assert int(result.state.step) == len(sizes)
    for batch in batches:
        num_ids = batch.features["f"].values.size
        assert max(id_buffers(trainer.pack(batch).ids)) <= FACTOR * num_ids
    return count.programs


@pytest.mark.parametrize(
    ("sizes", "weighted"),
    [(range(700, 1000), False), pytest.param(range(500, 3500, 10), True, marks=SLOW)],
)
def test_300_batches_of_300_sizes_compile_at_most_12_programs(sizes, weighted):
    # A width of its own, so that no program is there already.
    trainer = make_trainer(make_mesh("1"), [js.FeatureSpec("f", table(dim=5 + weighted))])
    programs = run_of_sizes(trainer, sizes, 128, weighted)
    print(f"{programs} programs for {len(sizes)} sizes in {sizes}")
    assert programs == len({bucket(size) for size in sizes}) <= 12


@pytest.mark.parametrize("mesh_name", ["4", pytest.param("8", marks=SLOW)])
def test_on_several_devices_the_fullest_one_decides(mesh_name):
    """Parts of one program are equally long: buffers are 1.25 times what the fullest one needs."""
    mesh = make_mesh(mesh_name)
    emb = js.EmbeddingCollection([js.FeatureSpec("f", table(dim=5))], mesh=mesh)
    rng = np.random.default_rng(0)
    for size in range(700, 1000, 10):
        bags = ragged(rng, size, 128)
        fullest = np.add.reduceat(bags.lengths, np.arange(0, 128, 128 // mesh.size)).max()
        assert max(id_buffers(emb.pack({"f": bags}))) <= FACTOR * fullest * mesh.size


@pytest.mark.slow
def test_batches_of_1_to_300_ids_compile_at_most_as_often_as_there_are_buckets():
    """I01: new shapes at every step let caches and memory grow without end."""
    trainer = make_trainer(make_mesh("1"), [js.FeatureSpec("f", table(dim=7))])
    programs = run_of_sizes(trainer, range(1, 301), 64)
    print(f"{programs} programs for 1 .. 300 ids")
    assert programs <= len({bucket(size) for size in range(1, 301)})


@pytest.mark.parametrize("mesh_name", ["1", pytest.param("4", marks=SLOW)])
def test_the_second_step_of_a_bucket_compiles_nothing(mesh_name):
    """With ragged and with fixed-size features; a smaller last batch is a bucket of its own."""
    rng = np.random.default_rng(0)
    features = [
        js.FeatureSpec("ragged", table()),
        js.FeatureSpec("fixed", table("u", placement="replicated")),
        js.FeatureSpec("last", table("w", dim=3, rule=js.Adam(0.1))),
    ]
    trainer = make_trainer(make_mesh(mesh_name), features)

    def batch(num_samples, num_missing):
        # The fullest device decides: only the first sample, so the first device, has fewer.
        lengths = np.full(num_samples, 8)
        lengths[0] -= num_missing
        columns = {
            "ragged": js.Ragged.from_lengths(rng.integers(0, 1000, lengths.sum()), lengths),
            "fixed": rng.integers(0, 1000, (num_samples, 3)),
            "last": rng.integers(0, 1000, num_samples),
        }
        return batch_of(columns, num_samples)

    state = trainer.init(jax.random.key(0))
    for num_samples in (64, 48):
        state, _ = trainer.step(state, batch(num_samples, 0))
        with count_compiles() as count:
            for num_missing in range(8):
                state, _ = trainer.step(state, batch(num_samples, num_missing))
        assert count.programs == 0


def test_equal_steps_compile_one_program():
    """I02: weakly typed scalars in the state made others compile the second step again."""
    rng = np.random.default_rng(0)
    trainer = make_trainer(make_mesh("2"), [js.FeatureSpec("f", table(dim=9))])
    state = trainer.init(jax.random.key(0))
    packed = [trainer.pack(batch_of({"f": rng.integers(0, 1000, 32)}, 32)) for _ in range(10)]
    with count_compiles() as count:
        for batch in packed:
            state, _ = trainer.step(state, batch)
    assert count.programs == 1


def test_a_new_learning_rate_compiles_nothing():
    """I03: a closure per rate compiles again each time, and piles up."""
    rng = np.random.default_rng(0)
    batch = batch_of({"f": rng.integers(0, 1000, 32)}, 32)
    compiled, rows = [], []
    for rate in (0.4, 0.2, 0.1, 0.05, 0.025):
        features = [js.FeatureSpec("f", table(dim=10, rule=js.Adagrad(rate)))]
        trainer = make_trainer(make_mesh("1"), features)
        state, packed = trainer.init(jax.random.key(0)), trainer.pack(batch)
        with count_compiles() as count:
            state, _ = trainer.step(state, packed)
        compiled.append(count.programs)
        rows.append(trainer.emb.read(state.embeddings, "t", batch.features["f"][:1]))
    assert compiled == [1, 0, 0, 0, 0]
    assert len({row.tobytes() for row in rows}) == 5


def test_a_new_factor_of_a_schedule_compiles_nothing():
    """I03, where the rate has a schedule; so does a rate that changes within a run."""
    schedule = optax.exponential_decay(0.5, transition_steps=2, decay_rate=0.5)
    rng = np.random.default_rng(0)
    features = [js.FeatureSpec("f", table(dim=11, rule=js.Adagrad(schedule)))]
    trainer = make_trainer(make_mesh("1"), features)
    batch = trainer.pack(batch_of({"f": rng.integers(0, 1000, 32)}, 32))
    state, _ = trainer.step(trainer.init(jax.random.key(0)), batch)
    for factor in (0.5, 2.0, 0.0):
        embeddings = state.embeddings.with_learning_rate("t", factor)
        before = np.asarray(embeddings.slabs[0])
        state = dataclasses.replace(state, embeddings=embeddings)
        with count_compiles() as count:
            state, _ = trainer.step(state, batch)
        assert count.programs == 0
        assert np.array_equal(before, state.embeddings.slabs[0]) == (factor == 0)


# ---- memory -----------------------------------------------------------------------------------

GROWTH = """
import ctypes, gc, os, sys
import jax, numpy as np
import jaxsparse as js
from tests.test_shapes_and_memory import batch_of, make_trainer, ragged, table

def resident_kib():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed is no growth, wherever it lies
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

rng = np.random.default_rng(0)
features = [js.FeatureSpec("f", table()), js.FeatureSpec("g", table("u", placement="replicated"))]
trainer = make_trainer(js.make_mesh(), features)
batches = [
    batch_of({"f": ragged(rng, 500 + n, 64), "g": rng.integers(0, 1000, 64)}, 64)
    for n in range(25)
]
at = {}
def remember(event):
    at[event.step] = resident_kib()
trainer.fit(batches, steps=1000, log_every=100, callbacks=[remember], progress=False)
print(at[100], at[1000])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("num_devices", [1, 4])
def test_memory_does_not_grow_with_steps(num_devices):
    """Resident bytes from step 100 to 1,000 of `fit`, its metrics and history included."""
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", GROWTH],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    early, late = map(int, done.stdout.split())
    print(f"{num_devices} devices: {early} KiB at step 100, {late} KiB at step 1,000")
    assert late < 1.01 * early


@pytest.mark.parametrize("mesh_name", [pytest.param(m, marks=SLOW) for m in "14"] + ["8"])
def test_a_plan_tells_the_bytes_that_are_held(mesh_name):
    mesh = make_mesh(mesh_name)
    tables = [
        table("cut", 50_021, 16, js.Adam(0.1, per_row_count=True)),
        table("half", 30_011, 24, js.RowwiseAdagrad(0.1), dtype="bfloat16"),
        table("copied", 3_001, 16, js.Adagrad(0.1), placement="replicated"),
        table("one", 9_001, 16, js.Ftrl(0.1), placement="single"),
        table("two", 5_003, 16, js.Ftrl(0.1), placement="single"),
        table("planned", 40_009, 16, js.Ftrl(0.1), placement="auto"),
        table("frozen", 8_009, 12, trainable=False),
    ]
    emb = js.EmbeddingCollection([js.FeatureSpec(t.name, t) for t in tables], mesh=mesh)
    told = emb.plan.bytes_per_device
    held = dict.fromkeys(mesh.devices.flat, 0)
    for array in jax.tree.leaves(emb.init(jax.random.key(0))):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    for planned, device in zip(told, mesh.devices.flat, strict=True):
        assert held[device] == pytest.approx(planned, rel=0.05)
    print(f"mesh {mesh_name}: planned {told[0]} bytes a device, held {max(held.values())}")


# ---- donation ---------------------------------------------------------------------------------


def no_aliases(tree):
    """Whether every array of a tree has buffers of its own."""
    pointers = [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        for shard in leaf.addressable_shards
    ]
    return len(pointers) == len(set(pointers))


class Twins(nnx.Module):
    """Two parameters that begin as one array."""

    def __init__(self, array):
        self.first, self.second = nnx.Param(array), nnx.Param(array)

    def __call__(self, acts, dense, train=False):
        scores = sum((act @ self.first[...] for act in acts.values()), jnp.float32(0))
        return scores + self.second[...].sum()


@pytest.mark.parametrize("mesh_name", ["1", "4"])
def test_shared_tables_and_aliased_arrays_are_donated_once(mesh_name):
    """I04: a buffer passed twice with donation hung, or raised later."""
    shared = table(rule=js.Adam(0.1))
    features = [js.FeatureSpec(name, shared) for name in ("seen", "clicked")]
    emb = js.EmbeddingCollection(features, mesh=make_mesh(mesh_name))
    trainer = js.Trainer(Twins(jnp.ones(4)), emb, optimizer=optax.adam(0.1))
    assert all(no_aliases(emb.init(jax.random.key(seed))) for seed in range(40))
    state = trainer.init(jax.random.key(0))
    # Adam's two moments and the twins are equal arrays, and must not become one; on several
    # devices the copies of a scalar are equal as well.
    assert no_aliases(state)
    keys = np.arange(16)
    for _ in range(3):
        state, outcome = trainer.step(state, batch_of({"seen": keys, "clicked": keys}, 16))
        assert bool(outcome["finite"])
    assert no_aliases(state)


@pytest.mark.parametrize("mesh_name", ["1", "4"])
@pytest.mark.parametrize("make", [np.array, jnp.array])
def test_arrays_of_the_user_stay_as_they_are(mesh_name, make):
    """I05: a copy aliased the user's array, and donation took it away."""
    trained = table(rows=64, dim=16)  # 64-byte rows: what XLA for CPU borrows without a copy
    emb = js.EmbeddingCollection([js.FeatureSpec("f", trained)], mesh=make_mesh(mesh_name))
    rng = np.random.default_rng(0)
    given = {
        "rows": rng.random((64, 16), np.float32),
        "param": rng.random(16, np.float32),
        "keys": np.arange(64),
        "labels": np.arange(64, dtype=np.float32) % 2,
        "weights": np.ones(64, np.float32),
    }
    mine = {name: make(array) for name, array in given.items()}
    trainer = js.Trainer(Twins(mine["param"]), emb, optimizer=optax.adam(0.1))
    state = trainer.init(jax.random.key(0))
    start = emb.write(state.embeddings, "t", mine["keys"], mine["rows"])
    state = dataclasses.replace(state, embeddings=start)
    np.testing.assert_array_equal(emb.read(start, "t", mine["keys"]), given["rows"])
    batch = js.Batch({"f": mine["keys"]}, labels=mine["labels"], weights=mine["weights"])
    for _ in range(3):
        state, _ = trainer.step(state, batch)
    assert not np.array_equal(emb.read(state.embeddings, "t", mine["keys"]), given["rows"])
    for name, array in mine.items():
        np.testing.assert_array_equal(array, given[name], err_msg=name)
    # The trainer still has its own initial parameters: it can begin again.
    again = trainer.init(jax.random.key(0))
    assert np.array_equal(jax.tree.leaves(again.params)[0], given["param"])


# ---- rows beside the ones that are asked for --------------------------------------------------

WIDTHS = (1, 3, 5, 8, 12, 96, 100, 129)


@pytest.mark.parametrize(
    ("mesh_name", "placement"),
    [
        ("1", "sharded"),
        pytest.param("4", "sharded", marks=SLOW),
        pytest.param("1", "replicated", marks=SLOW),
        pytest.param("4", "replicated", marks=SLOW),
    ],
)
def test_neighbours_of_any_width_are_never_read(mesh_name, placement):
    """I06, I07: masked or blocked loads took in the next row, or what lies behind the last one."""
    num_rows, keys = 101, np.array([0, 100, 50, 50, 7, 100, 99])
    # Initial rows are not looked at: those of eight widths take long to compile.
    options = {"placement": placement, "initializer": js.constant(0.0)}
    tables = [table(f"t{dim}", num_rows, dim, js.Adagrad(0.5), **options) for dim in WIDTHS]
    emb = js.EmbeddingCollection(
        [js.FeatureSpec(t.name, t) for t in tables], mesh=make_mesh(mesh_name)
    )
    rng = np.random.default_rng(0)
    state = emb.init(jax.random.key(0))
    # All is NaN, slots and rows without an id too, but for the rows of the keys.
    state = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.ndim else x, state)
    touched = np.unique(keys)
    start = {t.name: rng.random((touched.size, t.embedding_dim), np.float32) for t in tables}
    for name, rows in start.items():
        state = emb.write(state, name, touched, rows)
    state = dataclasses.replace(state, slots=touched_slots(emb, state, touched))

    acts, residuals = emb.lookup(state, emb.pack({t.name: keys for t in tables}))
    grads = {}
    for name, rows in start.items():
        got = np.asarray(acts[name])[: keys.size]
        np.testing.assert_array_equal(got, rows[np.searchsorted(touched, keys)])
        grads[name] = jnp.ones_like(acts[name])
    state = emb.update(state, residuals, grads, step=0)
    count = np.bincount(np.searchsorted(touched, keys))[:, None].astype(np.float32)
    others = np.setdiff1d(np.arange(num_rows), touched)
    for name, rows in start.items():
        accumulator = 0.25 + count**2
        want = rows - 0.5 * count / np.sqrt(accumulator)
        np.testing.assert_allclose(emb.read(state, name, touched), want, rtol=1e-5, atol=1e-6)
        slots = emb.read_slots(state, name, touched)["accumulator"]
        np.testing.assert_allclose(slots, np.broadcast_to(accumulator, slots.shape), rtol=1e-6)
        assert np.isnan(emb.read(state, name, others)).all()
        assert np.isnan(emb.read_slots(state, name, others)["accumulator"]).all()


def touched_slots(emb, state, keys):
    """Slots that are 0.25 where the slab is not NaN."""
    return tuple(
        {name: jnp.where(jnp.isnan(slab), jnp.nan, 0.25) for name in slots}
        for slab, slots in zip(state.slabs, state.slots, strict=True)
    )


@pytest.mark.parametrize(
    "keys", [[3, 2, 1, 1, 2], [1] * 5, [0] * 5, [4] * 5, [], [0, 1, 2, 3, 4]], ids=str
)
@pytest.mark.parametrize("mesh_name", ["1", "2"])
def test_padding_touches_no_row(mesh_name, keys):
    """I09: a padded dedup filled up with the smallest id, so a real row moved for nothing."""
    emb = js.EmbeddingCollection(
        [js.FeatureSpec("f", table(rows=5, rule=js.Adagrad(0.5, initial_accumulator=0.25)))],
        mesh=make_mesh(mesh_name),
    )
    state = emb.init(jax.random.key(0))
    every = np.arange(5)
    before = emb.read(state, "t", every)
    bag = js.Ragged(np.array(keys, np.int64), np.array([0, len(keys)]))
    acts, residuals = emb.lookup(state, emb.pack({"f": bag}, rung=8))
    np.testing.assert_allclose(acts["f"][0], before[keys].sum(axis=0), rtol=1e-6, atol=1e-7)
    state = emb.update(state, residuals, {"f": jnp.ones_like(acts["f"])}, step=0)
    count = np.bincount(keys, minlength=5)[:, None].astype(np.float32)
    accumulator = np.broadcast_to(0.25 + count**2, (5, 4))
    np.testing.assert_array_equal(emb.read_slots(state, "t", every)["accumulator"], accumulator)
    after = emb.read(state, "t", every)
    np.testing.assert_allclose(after, before - 0.5 * count / np.sqrt(accumulator), rtol=1e-6)
    untouched = count[:, 0] == 0
    assert after[untouched].tobytes() == before[untouched].tobytes()


# ---- 64 bits ----------------------------------------------------------------------------------


def test_more_rows_than_int32_can_count_are_refused():
    """I10: what 32 bits cannot address is refused with need and have, before any allocation."""
    big = table("big", rows=2 * 2**31)
    with pytest.raises(ValueError, match=r"needs 4,294,967,296 rows on a shard, .* 2,147,483,646"):
        make_layout_on("1", big)
    with pytest.raises(ValueError, match="'big' sharded"):
        make_layout_on("2", big)
    with pytest.raises(ValueError, match="'big' replicated"):
        make_layout_on("4", dataclasses.replace(big, placement="replicated"))
    with pytest.raises(ValueError, match="'big' single"):
        make_layout_on("4", dataclasses.replace(big, placement="single"))
    (slab,) = make_layout_on("4", big).slabs
    assert slab.rows_per_shard <= MAX_ROWS_PER_SHARD
    # Two that fit alone, but not together in one slab.
    with pytest.raises(ValueError, match="rows on a shard"):
        make_layout_on("2", dataclasses.replace(big, vocabulary_size=3 * 10**9), table("u", 2**31))


def make_layout_on(mesh_name, *tables):
    features = [js.FeatureSpec(t.name, t) for t in tables]
    return js.EmbeddingCollection(features, mesh=make_mesh(mesh_name)).layout


EXTREMES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("mesh_name", ["1", "4"])
def test_keys_of_64_bits_stay_apart_with_x64_off(mesh_name):
    assert not jax.config.jax_enable_x64
    rng = np.random.default_rng(0)
    random_keys = rng.integers(0, 2**64, 150, np.uint64, endpoint=False)
    # Neighbours that a float64, or the low or the high half alone, would take for one.
    near = np.array([2**53, 2**54 + 2, 2**60 + 1, 2**60 + 2, 7 + (1 << 40), 7], np.uint64)
    keys = np.unique(np.concatenate([np.array(EXTREMES, np.uint64), random_keys, near]))
    hashed = table(rows=2**20, dim=3, rule=js.SGD(1.0), keys=js.Hashed())
    emb = js.EmbeddingCollection([js.FeatureSpec("f", hashed)], mesh=make_mesh(mesh_name))
    rows = hashed.keys.rows(keys, 2**20)
    assert np.unique(rows).size == keys.size, "keys were chosen without collisions"
    values = np.arange(keys.size * 3, dtype=np.float32).reshape(-1, 3)
    state = emb.write(emb.init(jax.random.key(0)), "t", keys, values)

    signed = keys.view(np.int64)
    for same in (keys, signed, keys.astype(object)):
        np.testing.assert_array_equal(emb.read(state, "t", same), values)
        acts, residuals = emb.lookup(state, emb.pack({"f": same}))
        np.testing.assert_array_equal(np.asarray(acts["f"])[: keys.size], values)
    bags = js.Ragged.from_lengths(signed, np.ones(keys.size, np.int64))
    acts, _ = emb.lookup(state, emb.pack({"f": bags}))
    np.testing.assert_array_equal(np.asarray(acts["f"])[: keys.size], values)

    grads = np.zeros(acts["f"].shape, np.float32)
    grads[: keys.size] = np.arange(keys.size)[:, None]
    state = emb.update(state, residuals, {"f": jnp.asarray(grads)}, step=0)
    want = values - np.arange(keys.size, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(emb.read(state, "t", signed), want)


@pytest.mark.parametrize(
    ("mesh_name", "num_rows"),
    [("3", 5 * 10**9), ("8", 5 * 10**9), ("2x4", 5 * 10**9), ("8", 2**33 + 1)],
)
def test_addresses_beyond_32_bits_are_exact(mesh_name, num_rows):
    """`pack` for tables of which no device here could hold a part."""
    rng = np.random.default_rng(0)
    big = table(rows=num_rows)
    beside = table("u", rows=1000)  # so that the second block has an offset
    mesh = make_mesh(mesh_name)
    features = [js.FeatureSpec("g", beside), js.FeatureSpec("f", big)]
    emb = js.EmbeddingCollection(features, mesh=mesh)
    keys = np.concatenate([rng.integers(0, num_rows, 500), [0, 1, num_rows - 1, num_rows // 2]])
    keys = np.concatenate([keys, keys[:96]])
    ids = emb.pack({"f": keys, "g": np.full(keys.size, 3)})

    slab, index = emb.layout.find("t")
    block, shards = slab.tables[index], mesh.size
    assert slab.rows_per_shard * shards > 2**32
    capacity = ids.slabs[0].capacity
    by_device = np.asarray(ids.slabs[0].rows).reshape(shards, shards, capacity)
    inverse = np.asarray(ids.slabs[0].inverse).reshape(shards, -1)
    samples = ids.padded_samples // shards
    (column,) = [n for n, (name, _) in enumerate(ids.slabs[0].fixed) if name == "f"]
    found = []
    for device in range(shards):
        places = inverse[device, column * samples : (column + 1) * samples]
        places = places[places < shards * capacity]
        for place in places.tolist():  # python integers: no width to overflow
            owner, local = divmod(place, capacity)
            local = int(by_device[device, owner, local])
            found.append(owner * block.rows + local - block.offset)
    np.testing.assert_array_equal(block.addressing.id_at(np.array(found, np.int64)), keys)


@pytest.mark.parametrize("rows_per_shard", [1, 2**31 - 2, 2**40, 2**52])
def test_distinct_codes_beyond_32_bits_are_exact(rows_per_shard):
    """Both ways of sorting: one word for code and index, and where they do not fit one."""
    rng = np.random.default_rng(0)
    num_owners = 1024
    codes = rng.integers(0, num_owners * rows_per_shard, 5000)
    codes[rng.random(5000) < 0.1] = -1
    codes[:100] = codes[100:200]
    codes[-1] = num_owners * rows_per_shard - 1
    found = distinct(codes, num_owners, rows_per_shard)
    real = codes[codes >= 0]
    want, counts = np.unique(real, return_counts=True)
    np.testing.assert_array_equal(found.codes, want)
    np.testing.assert_array_equal(found.counts, counts)
    np.testing.assert_array_equal(codes[found.order], np.sort(real))
    owners = [code // rows_per_shard for code in want.tolist()]
    assert np.diff(found.bounds).tolist() == np.bincount(owners, minlength=num_owners).tolist()
