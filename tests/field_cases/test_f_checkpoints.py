# SPDX-License-Identifier: Apache-2.0
"""Resume, reshard, crash and strictness."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.ckpt import CheckpointError, SaveError, restore_state, save_state
from jaxsparse.ckpt.rows import export_rows
from jaxsparse.cli import main
from tests.ckpt import runs

QUIET = {"progress": False, "log_every": 5}
MESHES = (1, 4, 8)


@pytest.fixture(scope="module")
def trainer():
    return runs.make_trainer(2)


@pytest.fixture(scope="module")
def by_mesh():
    return {devices: runs.make_trainer(devices, plain=True) for devices in MESHES}


def batches(count):
    return [batch for _, batch in zip(range(count), runs.train_data(), strict=False)]


def train(trainer, state, batches):
    losses = []
    for batch in batches:
        state, out = trainer.step(state, batch)
        losses.append(float(out["loss"]))
    return state, losses


def at_step(state, step):
    return dataclasses.replace(state, step=jax.device_put(jnp.int32(step), state.step.sharding))


def fresh(trainer, seed=0):
    return trainer.init(jax.random.key(seed))


@pytest.mark.slow
@pytest.mark.parametrize("saved_on", MESHES)
def test_f01_saved_on_any_mesh_loads_on_any_other(tmp_path, by_mesh, saved_on, capsys):
    source = by_mesh[saved_on]
    state, _ = train(source, fresh(source), batches(3))
    want = runs.leaves(source, state)
    manager = js.CheckpointManager(tmp_path)
    manager.save(source.emb, state)
    _, (want_loss,) = train(source, state, batches(4)[3:])
    for trainer in by_mesh.values():
        got = manager.restore(trainer.emb, fresh(trainer, 1)).state
        runs.assert_same(runs.leaves(trainer, got), want)
        _, (loss,) = train(trainer, got, batches(4)[3:])
        assert loss == pytest.approx(want_loss, rel=1e-6)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["leaves"]["tables/user/rows"] == [[runs.USERS, 4], "float32"]
    assert listed["steps"] == [3] and listed["tables"]["item"]["optimizer"] == "Adagrad"
    export_rows(manager.path(3), "user", tmp_path / "user.npz")
    with np.load(tmp_path / "user.npz") as rows:
        order = np.argsort(rows["keys"])
        read = source.emb.read(
            manager.restore(source.emb, fresh(source)).state.embeddings,
            "user",
            np.arange(runs.USERS),
        )
        np.testing.assert_array_equal(rows["vectors"][order], read)


@pytest.mark.slow
def test_f02_placements_may_change(tmp_path):
    data = batches(8)
    ends = []
    for before, after in (("sharded", "replicated"), ("replicated", "sharded")):
        first, second = (runs.make_trainer(2, placement=p) for p in (before, after))
        state, _ = train(first, fresh(first), data[:3])
        path = save_state(tmp_path / before, first.emb, state)
        _, losses = train(first, state, data[3:])
        loaded = restore_state(path, second.emb, fresh(second, 1))
        _, got = train(second, loaded, data[3:])
        assert got == pytest.approx(losses, rel=1e-6)
        ends.append(losses)
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)
    other = runs.make_trainer(2, sparse=js.Ftrl(0.1))
    with pytest.raises(CheckpointError, match=r"user/slot\.m: saved .* wanted none") as caught:
        restore_state(path, other.emb, fresh(other))
    assert "tables/user: optimizer was 'Adam', is 'Ftrl'" in str(caught.value)
    assert "make tables, model and optimizer as they were when it was saved" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [js.SGD(0.1), js.Adagrad(0.1), js.Adam(0.05), js.Ftrl(0.1)],
    ids=lambda r: type(r).__name__,
)
def test_f03_ten_and_ten_steps_are_twenty(tmp_path, rule):
    trainer = runs.make_trainer(2, sparse=rule)
    whole = trainer.fit(runs.train_data(), steps=20, **QUIET)
    for steps in (10, 20):
        manager = js.CheckpointManager(tmp_path, every=100)
        half = trainer.fit(runs.train_data(), steps=steps, checkpoint=manager, **QUIET)
    runs.assert_same(runs.leaves(trainer, half.state), runs.leaves(trainer, whole.state))
    assert runs.without_times(half.history) == runs.without_times(whole.history)


def test_f04_the_order_of_samples_goes_on(tmp_path, trainer):
    data = runs.train_data()
    whole = trainer.fit(data, epochs=4, **QUIET)
    ids = []
    for epochs in (2, 4):
        part = runs.train_data()
        manager = js.CheckpointManager(tmp_path, every=1000)
        result = trainer.fit(part, epochs=epochs, checkpoint=manager, **QUIET)
        ids += part.ids
    assert ids == data.ids
    runs.assert_same(runs.leaves(trainer, result.state), runs.leaves(trainer, whole.state))


@pytest.mark.slow
def test_f05_uneven_shards(tmp_path):
    trainer = runs.make_trainer(4, users=4091)
    data = batches(13)
    state, _ = train(trainer, fresh(trainer), data[:6])
    path = save_state(tmp_path / "6", trainer.emb, state)
    _, want = train(trainer, state, data[6:])
    _, got = train(trainer, restore_state(path, trainer.emb, fresh(trainer, 1)), data[6:])
    assert got == want


def test_f09_a_background_save_is_the_state_of_its_step(tmp_path, trainer):
    data = batches(7)
    state, _ = train(trainer, fresh(trainer), data[:2])
    want = runs.leaves(trainer, state)
    manager = js.CheckpointManager(tmp_path, background=True)
    manager.save(trainer.emb, state, run={"x": 1})
    state, _ = train(trainer, state, data[2:5])
    manager.save(trainer.emb, state)
    manager.close()
    assert manager.steps() == [2, 5]
    got = manager.restore(trainer.emb, fresh(trainer, 1), step=2)
    runs.assert_same(runs.leaves(trainer, got.state), want)


@pytest.mark.parametrize("called", ["save", "wait", "close", "fit"])
def test_f10_a_background_failure_is_heard(tmp_path, trainer, called):
    manager = js.CheckpointManager(tmp_path, background=True, every=3)
    manager.save(trainer.emb, fresh(trainer))
    manager.wait()
    for step in (1, 3):
        (tmp_path / f"{step:09d}.tmp").write_text("in the way")
    with pytest.raises(SaveError, match=r"cannot be saved: .*File exists.*; older saves are as"):
        if called == "fit":
            trainer.fit(runs.train_data(), steps=8, checkpoint=manager, resume="never", **QUIET)
        else:
            manager.save(trainer.emb, at_step(fresh(trainer), 1))
            if called == "save":
                manager.save(trainer.emb, at_step(fresh(trainer), 2))
            getattr(manager, called)() if called != "save" else None


def test_f12_the_newest_and_the_best_are_kept(tmp_path, trainer):
    manager = js.CheckpointManager(tmp_path, every=1, keep=3, best="auc")
    for step, auc in enumerate([0.9, 0.8, 0.7, 0.6, 0.5, 0.4], 1):
        manager.save(trainer.emb, at_step(fresh(trainer), step), metrics={"auc": auc})
    assert manager.steps() == [1, 4, 5, 6]
    assert (manager.latest(), manager.best_step()) == (6, 1)


def test_f13_a_run_from_step_0_among_later_saves_is_refused(tmp_path, trainer):
    manager = js.CheckpointManager(tmp_path, every=2)
    trainer.fit(runs.train_data(), steps=4, checkpoint=manager, **QUIET)
    message = (
        r"holds saves up to step 4, and this run starts at step 0; go on from there with "
        r"resume='auto', give the run another folder, or delete this one"
    )
    with pytest.raises(CheckpointError, match=message):
        trainer.fit(runs.train_data(), steps=4, checkpoint=manager, resume="never", **QUIET)
    with pytest.raises(CheckpointError, match=message):
        manager.save(trainer.emb, fresh(trainer))
    assert manager.steps() == [2, 4]


def one_table(dim=16, rows=60, extra=(), **options):
    tables = [js.TableSpec("t", vocabulary_size=rows, embedding_dim=dim, **options)]
    tables += [js.TableSpec(name, vocabulary_size=9, embedding_dim=4) for name in extra]
    mesh = js.make_mesh(devices=jax.devices()[:2])
    return js.EmbeddingCollection([js.FeatureSpec(t.name, t) for t in tables], mesh=mesh)


@dataclasses.dataclass(frozen=True)
class Bare:
    """A state of tables and one leaf of any kind."""

    embeddings: Any
    leaf: Any
    step: Any


jax.tree_util.register_dataclass(Bare, ("embeddings", "leaf", "step"), ())


def bare(emb, leaf=None, seed=0):
    leaf = jnp.ones(3) if leaf is None else leaf
    return Bare(emb.init(jax.random.key(seed)), leaf, jnp.int32(1))


@pytest.mark.parametrize(
    ("other", "lines"),
    [
        (
            {"dim": 8},
            ["tables/t: embedding_dim was 16, is 8", "rows: saved float32[60, 16], wanted"],
        ),
        ({"rows": 40}, ["tables/t: vocabulary_size was 60, is 40"]),
        ({"extra": ["a"]}, ["tables/b: saved, but there is no such table now"]),
        ({"keys": js.Hashed()}, ["tables/t: keys was 'identity', is 'hashed 1 "]),
        (
            {"optimizer": js.SGD(0.1)},
            ["optimizer was 'Adagrad', is 'SGD'", "accumulator: saved float"],
        ),
    ],
    ids=["dim", "rows", "tables", "keys", "rule"],
)
def test_f14_what_does_not_fit_is_named(tmp_path, other, lines):
    emb = one_table(extra=["a", "b"])
    path = save_state(tmp_path / "1", emb, bare(emb))
    changed = one_table(**{"extra": ["a", "b"], **other})
    with pytest.raises(CheckpointError) as caught:
        restore_state(path, changed, bare(changed))
    text = str(caught.value)
    assert all(line in text for line in lines), text
    assert "tables/a" not in text
    assert "write them to a file with `jaxsparse export`" in text


def test_f15_a_new_table_starts_from_its_initializer_if_allowed(tmp_path):
    old, new = one_table(), one_table(extra=["late"])
    state = dataclasses.replace(bare(old), leaf={"w": jnp.full(2, 7.0)})
    strict = js.CheckpointManager(tmp_path)
    strict.save(old, state)
    template = dataclasses.replace(bare(new, seed=5), leaf={"w": jnp.zeros(2), "v": jnp.ones(4)})
    want = new.read(template.embeddings, "late", np.arange(9))
    message = (
        r"tables/late: not in the checkpoint\n  features/late: not in the checkpoint\n"
        r"  dense/leaf.v: not in the checkpoint\nwhat the checkpoint lacks starts from its initial "
        r"values with allow_new=True"
    )
    with pytest.raises(CheckpointError, match=message):
        strict.restore(new, template)
    got = js.CheckpointManager(tmp_path, allow_new=True).restore(new, template)
    assert got.new == ("tables/late", "features/late", "dense/leaf.v")
    late = new.read(got.state.embeddings, "late", np.arange(9))
    np.testing.assert_array_equal(late, want)
    assert np.abs(late).min() > 0
    for name, read in (("t", old.read), ("t", old.read_slots)):
        saved = read(state.embeddings, name, np.arange(60))
        loaded = getattr(new, read.__name__)(got.state.embeddings, name, np.arange(60))
        jax.tree.map(np.testing.assert_array_equal, loaded, saved)
    assert got.state.leaf["w"].tolist() == [7, 7] and got.state.leaf["v"].tolist() == [1] * 4


def test_f17_arrays_without_elements(tmp_path):
    emb = one_table()
    leaf = {"none": jnp.zeros((0, 3)), "some": jnp.ones(2)}
    path = save_state(tmp_path / "1", emb, bare(emb, leaf))
    got = restore_state(path, emb, bare(emb, leaf)).leaf
    assert got["none"].shape == (0, 3) and got["some"].tolist() == [1, 1]
    path = save_state(tmp_path / "2", emb, dataclasses.replace(bare(emb), leaf={}))
    assert restore_state(path, emb, dataclasses.replace(bare(emb), leaf={})).leaf == {}


def test_f24_integer_keys_stay_integers(tmp_path):
    emb = one_table()
    leaf = {1: jnp.ones(1), 20: {3: jnp.zeros(2)}}
    path = save_state(tmp_path / "1", emb, bare(emb, leaf))
    got = restore_state(path, emb, bare(emb, jax.tree.map(jnp.zeros_like, leaf))).leaf
    assert list(got) == [1, 20] and list(got[20]) == [3] and got[1].tolist() == [1]


@pytest.mark.slow
def test_f25_replicas_are_equal_on_another_mesh(tmp_path, by_mesh):
    trainer, other = runs.make_trainer(2, plain=True), by_mesh[4]
    state, _ = train(trainer, fresh(trainer), batches(2))
    path = save_state(tmp_path / "2", trainer.emb, state)
    got = restore_state(path, other.emb, fresh(other, 1))
    for leaf in jax.tree.leaves((got.params, got.opt_state, got.embeddings.learning_rates)):
        copies = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
        assert len(copies) == 4 and len(set(copies)) == 1
