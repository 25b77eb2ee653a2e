# SPDX-License-Identifier: Apache-2.0
"""Promise 7: a run compiles a handful of programs (field cases I01-I03 are here too)."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.bag_plan import BagPlan
from jaxsparse.ladder import FACTOR, bucket
from jaxsparse.testing import count_compiles
from tests.combinations import make_mesh
from tests.small_trainers import batch_of, make_trainer, ragged, table

SLOW = pytest.mark.slow


def id_buffers(ids):
    """Lengths of the arrays with an entry an id, of a collection of ragged features alone."""
    for slab in ids.slabs:
        assert not slab.fixed
        yield slab.inverse.shape[0]
        if isinstance(slab.plan, BagPlan):
            yield slab.plan.row_bags.shape[0]
        else:
            yield slab.plan.bag.shape[0]
            yield from (slab.plan.row_levels[0].shape[0], slab.plan.bag_levels[0].shape[0])
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
