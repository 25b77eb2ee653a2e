# SPDX-License-Identifier: Apache-2.0
"""A state saved on one mesh loads on any other, bit for bit; what does not fit is named."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxsparse as js
from jaxsparse.ckpt import CheckpointError, SaveError, restore_state, save_state
from jaxsparse.ckpt.loading import load_state

TABLES = {
    "user": {"vocabulary_size": 5_000, "optimizer": js.Adam(0.1)},
    "a/b": {"vocabulary_size": 1_031, "optimizer": js.Adam(0.2)},
    "tiny": {"vocabulary_size": 3, "optimizer": js.RowwiseAdagrad(0.1), "placement": "replicated"},
    "alone": {"vocabulary_size": 101, "optimizer": js.Adam(0.3), "placement": "single"},
    "frozen": {"vocabulary_size": 40, "trainable": False, "dtype": jnp.bfloat16},
}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "params", "embeddings", "rng"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class State:
    step: Any
    params: Any
    embeddings: Any
    rng: Any


def make_emb(
    num_devices: int, *, nodes: int | None = None, **changes: dict[str, Any]
) -> js.EmbeddingCollection:
    mesh = js.make_mesh(nodes, devices=jax.devices()[:num_devices])
    options = {name: {**TABLES[name], **changes.get(name, {})} for name in TABLES}
    tables = [js.TableSpec(name, embedding_dim=4, **option) for name, option in options.items()]
    return js.EmbeddingCollection([js.FeatureSpec(t.name, t) for t in tables], mesh=mesh)


def make_state(emb: js.EmbeddingCollection, seed: int, steps: int = 0) -> State:
    embeddings = emb.init(jax.random.key(seed))
    rng = np.random.default_rng(seed)
    for step in range(steps):
        keys = {n: rng.integers(0, t.vocabulary_size, 64) for n, t in emb.tables.items()}
        acts, residuals = emb.lookup(embeddings, emb.pack(keys))
        embeddings = emb.update(embeddings, residuals, acts, step=step)
    params = {"top": [{"kernel": jnp.full((3, 2), seed + 0.1, jnp.bfloat16)}]}
    whole = NamedSharding(emb.mesh, PartitionSpec())
    rest = (jnp.int32(steps), params, optax.adam(1e-3).init(params), jax.random.key(seed + 7))
    step, params, opt_state, key = jax.device_put(rest, whole)
    return State(step, {"model": params, "opt": opt_state}, embeddings, key)


def contents(emb: js.EmbeddingCollection, state: State) -> dict[str, np.ndarray]:
    """All rows and slots by id, and every other leaf."""
    found = {}
    for name, table in emb.tables.items():
        keys = np.arange(table.vocabulary_size)
        found[name] = emb.read(state.embeddings, name, keys)
        for slot, values in emb.read_slots(state.embeddings, name, keys).items():
            found[f"{name}.{slot}"] = values
    rest = dataclasses.replace(
        state, embeddings=state.embeddings.learning_rates, rng=jax.random.key_data(state.rng)
    )
    for path, leaf in jax.tree_util.tree_flatten_with_path(rest)[0]:
        found[jax.tree_util.keystr(path)] = np.asarray(leaf)
    return found


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        assert got[name].tobytes() == value.tobytes(), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, dict[str, np.ndarray]]:
    emb = make_emb(8)
    state = make_state(emb, seed=1, steps=3)
    want = contents(emb, state)
    path = save_state(tmp_path_factory.mktemp("ckpt") / "run" / "3", emb, state)
    assert_same(contents(emb, state), want)
    return path, want


SLOW_MESHES = ((1, None), (8, None), (4, 2))


@pytest.mark.parametrize(
    ("num_devices", "nodes"),
    [(3, None), *(pytest.param(*on, marks=pytest.mark.slow) for on in SLOW_MESHES)],
)
def test_saved_on_8_devices_loads_on_any_mesh(
    saved: tuple[pathlib.Path, dict[str, np.ndarray]], num_devices: int, nodes: int | None
) -> None:
    path, want = saved
    emb = make_emb(num_devices, nodes=nodes)
    template = make_state(emb, seed=2)
    got = restore_state(path, emb, template)
    assert_same(contents(emb, got), want)
    for new, old in zip(jax.tree.leaves(got), jax.tree.leaves(template), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
        assert (new.shape, new.dtype) == (old.shape, old.dtype)


@pytest.mark.slow
def test_placements_may_change_between_saving_and_loading(
    saved: tuple[pathlib.Path, dict[str, np.ndarray]],
) -> None:
    path, want = saved
    changes = {
        "user": {"placement": "single"},
        "tiny": {"placement": "sharded"},
        "alone": {"placement": "replicated"},
    }
    emb = make_emb(3, **changes)
    assert_same(contents(emb, restore_state(path, emb, make_state(emb, seed=2))), want)


def test_training_goes_on_as_if_nothing_had_happened(tmp_path: pathlib.Path) -> None:
    emb = make_emb(3)
    path = save_state(tmp_path / "2", emb, make_state(emb, seed=5, steps=2))
    restored = restore_state(path, emb, make_state(emb, seed=6)).embeddings
    original = make_state(emb, seed=5, steps=2).embeddings
    ids = emb.pack({name: np.arange(3) for name in TABLES})
    results = []
    for embeddings in (original, restored):
        acts, residuals = emb.lookup(embeddings, ids)
        moved = emb.update(embeddings, residuals, acts, step=2)
        results.append(emb.read(moved, "user", np.arange(100)))
    np.testing.assert_array_equal(*results)


def test_nothing_but_the_checkpoint_is_left_and_none_is_overwritten(
    saved: tuple[pathlib.Path, dict[str, np.ndarray]],
) -> None:
    path, _ = saved
    assert [p.name for p in path.parent.iterdir()] == ["3"]
    emb = make_emb(1)
    with pytest.raises(CheckpointError, match=r"3: exists; a checkpoint is never overwritten"):
        save_state(path, emb, make_state(emb, seed=1))


def test_a_save_that_fails_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: pathlib.Path, leaves: Any) -> None:
        path.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxsparse.ckpt.checkpoint.write_dense", fail)
    emb = make_emb(1)
    message = (
        r"1: cannot be saved: no space is left on the device \(\[Errno 28\] No space left on "
        r"device\); older saves are as they were"
    )
    with pytest.raises(SaveError, match=message):
        save_state(tmp_path / "1", emb, make_state(emb, seed=1))
    assert list(tmp_path.iterdir()) == []


def edit(path: pathlib.Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_what_does_not_fit_is_named_leaf_by_leaf(
    saved: tuple[pathlib.Path, dict[str, np.ndarray]],
) -> None:
    path, _ = saved
    changes = {"user": {"vocabulary_size": 4_000}, "frozen": {"trainable": True}}
    emb = make_emb(3, **changes)
    template = make_state(emb, seed=2)
    template = dataclasses.replace(template, params={"other": jnp.zeros(2)})
    with pytest.raises(CheckpointError) as caught:
        restore_state(path, emb, template)
    text = str(caught.value)
    assert "3: does not fit the state:\n" in text
    for line in (
        "tables/user: vocabulary_size was 5000, is 4000",
        "tables/user/rows: saved float32[5000, 4], wanted float32[4000, 4]",
        "tables/user/slot.m: saved float32[5000, 4], wanted float32[4000, 4]",
        "tables/frozen: optimizer was 'frozen', is 'Adagrad'",
        "tables/frozen/slot.accumulator: saved none, wanted float32[40, 4]",
        "dense/params.other: not in the checkpoint",
        "dense/params.model.top.0.kernel: saved bfloat16[3, 2], wanted none",
    ):
        assert line in text
    assert "a/b" not in text


def test_no_checkpoint_or_an_unreadable_one(tmp_path: pathlib.Path) -> None:
    emb = make_emb(1)
    state = make_state(emb, seed=1)
    message = f"{tmp_path / 'none'}: no checkpoint there (manifest.json is missing)"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        restore_state(tmp_path / "none", emb, state)
    path = save_state(tmp_path / "1", emb, state)
    edit(path, lambda manifest: manifest.update(format=99))
    with pytest.raises(CheckpointError, match=r"1: has format 99, this version reads 3"):
        restore_state(path, emb, state)
    (path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read: Expecting"):
        restore_state(path, emb, state)


def test_features_and_their_order_are_those_of_the_save(tmp_path: pathlib.Path) -> None:
    table = js.TableSpec("item", vocabulary_size=9, embedding_dim=4)
    other = js.TableSpec("user", vocabulary_size=9, embedding_dim=4)

    def collection(*features: js.FeatureSpec) -> js.EmbeddingCollection:
        return js.EmbeddingCollection(features, mesh=js.make_mesh(devices=jax.devices()[:1]))

    def state_of(emb: js.EmbeddingCollection) -> State:
        return State(jnp.int32(0), {}, emb.init(jax.random.key(0)), jax.random.key(1))

    def load(*features: js.FeatureSpec, allow_new: bool = False) -> str:
        emb = collection(*features)
        with pytest.raises(CheckpointError) as caught:
            load_state(path, emb, state_of(emb), allow_new=allow_new)
        return str(caught.value)

    seen, bought, user = (
        js.FeatureSpec("seen", table),
        js.FeatureSpec("bought", table),
        js.FeatureSpec("user", other),
    )
    emb = collection(seen, bought, user)
    path = save_state(tmp_path / "a", emb, state_of(emb))
    restore_state(path, emb, state_of(emb))
    message = "features: their order was ['seen', 'bought', 'user'], is ['user', 'seen', 'bought']"
    assert message in load(user, seen, bought)
    assert "features/bought: saved, but there is no such feature now" in load(seen, user)
    changed = dataclasses.replace(bought, table=other), dataclasses.replace(seen, combiner="mean")
    text = load(changed[1], changed[0], user)
    assert "features/seen: combiner was 'sum', is 'mean'" in text
    assert "features/bought: table was 'item', is 'user'" in text
    liked = js.FeatureSpec("liked", table)
    assert "features/liked: not in the checkpoint" in load(seen, liked, bought, user)
    wider = collection(seen, liked, bought, user)
    loaded = load_state(path, wider, state_of(wider), allow_new=True)
    assert loaded.new == ("features/liked",)
