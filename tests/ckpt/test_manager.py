# SPDX-License-Identifier: Apache-2.0
"""Which saves there are, which are kept, and that a name is never that of half a save."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import resource
import shutil
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.ckpt import CheckpointError, SaveError, durable
from tests.ckpt import runs


@pytest.fixture(scope="module")
def trainer() -> Any:
    return runs.make_trainer(2)


@pytest.fixture(scope="module")
def fresh(trainer: Any) -> Any:
    return trainer.init(jax.random.key(0))


def at_step(state: Any, step: int) -> Any:
    return dataclasses.replace(state, step=jax.device_put(jnp.int32(step), state.step.sharding))


def copy(state: Any) -> Any:
    return jax.tree.map(jnp.copy, state)


def test_the_newest_are_kept_and_a_link_names_the_latest(
    tmp_path: pathlib.Path, trainer: Any, fresh: Any
) -> None:
    manager = js.CheckpointManager(tmp_path / "run", every=1, keep=2)
    assert manager.latest() is None and manager.steps() == [] and manager.best_step() is None
    for step in (1, 5, 30):
        manager.save(trainer.emb, at_step(fresh, step), run={"at": step})
    assert manager.steps() == [5, 30] and manager.latest() == 30
    names = sorted(path.name for path in manager.folder.iterdir())
    assert names == [".lock", "000000005", "000000030", "latest"]
    assert os.readlink(manager.folder / "latest") == "000000030"
    restored = manager.restore(trainer.emb, copy(fresh))
    assert (restored.step, restored.run, restored.new) == (30, {"at": 30}, ())
    assert manager.restore(trainer.emb, copy(fresh), step=5).run == {"at": 5}
    manifest = manager.manifest(30)
    assert manifest["step"] == 30 and manifest["tables"]["user"]["vocabulary_size"] == runs.USERS


def test_a_save_in_the_background_copies_into_the_memory_of_the_last(
    tmp_path: pathlib.Path, trainer: Any, fresh: Any
) -> None:
    manager = js.CheckpointManager(tmp_path, every=1, background=True)
    assert not manager.is_saving
    manager.save(trainer.emb, at_step(fresh, 1))
    first = {key: id(part) for key, part in manager._copies[""].items()}
    # Donated at once, as the next step does: what is written is the copy.
    other = jax.jit(lambda s: jax.tree.map(lambda x: x * 2, s), donate_argnums=0)(
        copy(fresh.embeddings)
    )
    moved = dataclasses.replace(at_step(fresh, 2), embeddings=other)
    manager.save(trainer.emb, moved)
    assert {key: id(part) for key, part in manager._copies[""].items()} == first
    manager.wait()
    assert not manager.is_saving and manager.steps() == [1, 2]
    for step, want in ((1, fresh), (2, moved)):
        got = manager.restore(trainer.emb, copy(fresh), step).state
        runs.assert_same(runs.leaves(trainer, got), runs.leaves(trainer, at_step(want, step)))


def test_the_manifest_of_a_save_in_the_background_is_waited_for(
    tmp_path: pathlib.Path, trainer: Any, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = js.CheckpointManager(tmp_path, every=1, background=True)
    write = manager._write

    def slowly(*arguments: Any) -> None:
        time.sleep(0.2)
        write(*arguments)

    monkeypatch.setattr(manager, "_write", slowly)
    manager.save(trainer.emb, at_step(fresh, 1))
    assert manager.manifest(1)["step"] == 1
    with pytest.raises(js.CheckpointError, match="no checkpoint there"):
        manager.manifest(2)


def test_the_best_is_kept_beside_the_newest(
    tmp_path: pathlib.Path, trainer: Any, fresh: Any
) -> None:
    low = js.CheckpointManager(tmp_path, every=1, keep=1, best="loss", mode="min")
    for step, loss in enumerate([0.5, 0.2, float("nan"), 0.2, 0.9], 1):
        low.save(trainer.emb, at_step(fresh, step), metrics={"loss": loss, "kind": "eval"})
    assert low.steps() == [2, 5] and low.best_step() == 2
    assert low.manifest(2)["metrics"] == {"loss": 0.2}


def test_half_a_save_is_never_named_and_is_cleared_away(
    tmp_path: pathlib.Path, trainer: Any, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = js.CheckpointManager(tmp_path, keep=3)
    manager.save(trainer.emb, at_step(fresh, 1))
    shutil.copytree(manager.path(1), tmp_path / "000000002.tmp")
    shutil.copytree(manager.path(1), tmp_path / "000000000.del-77")
    shutil.copytree(manager.path(1), manager.path(3))
    os.remove(manager.path(3) / "manifest.json")
    assert manager.steps() == [1]
    monkeypatch.setattr(
        "jaxsparse.ckpt.durable.os.rename", lambda *_: pytest.fail("stopped before the name")
    )
    with pytest.raises(pytest.fail.Exception):
        manager.save(trainer.emb, at_step(fresh, 2))
    monkeypatch.undo()
    assert manager.steps() == [1]
    shutil.rmtree(manager.path(3))
    manager.save(trainer.emb, at_step(fresh, 2))
    names = [path.name for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()]
    assert sorted(names) == ["000000001", "000000002"]


def test_everything_is_on_the_disk_before_it_has_a_name(
    tmp_path: pathlib.Path, trainer: Any, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    rename = os.rename

    def noted_sync(path: pathlib.Path) -> None:
        calls.append(("sync", os.path.normpath(path)))

    def noted_rename(old: Any, new: Any) -> None:
        if not str(new).endswith("000000001"):
            return rename(old, new)  # orbax's own
        temporary = [os.path.normpath(old)]
        temporary += [os.path.join(p, n) for p, ds, fs in os.walk(old) for n in [*ds, *fs]]
        unsynced = set(temporary) - {path for kind, path in calls if kind == "sync"}
        assert not unsynced, unsynced
        calls.append(("rename", str(new)))
        return rename(old, new)

    monkeypatch.setattr(durable, "sync", noted_sync)
    monkeypatch.setattr("jaxsparse.durable.sync", noted_sync)
    monkeypatch.setattr("jaxsparse.ckpt.durable.os.rename", noted_rename)
    js.CheckpointManager(tmp_path / "a" / "b").save(trainer.emb, at_step(fresh, 1))
    assert calls[0] == ("sync", str(tmp_path)), "a new folder is entered in its parent"
    final = str(tmp_path / "a" / "b" / "000000001")
    assert calls[-2:] == [("rename", final), ("sync", str(tmp_path / "a" / "b"))]


def test_two_processes_do_not_save_in_one_folder(
    tmp_path: pathlib.Path, trainer: Any, fresh: Any
) -> None:
    manager = js.CheckpointManager(tmp_path)
    with durable.locked(tmp_path):
        message = (
            f"{manager.path(1)}: cannot be saved: {tmp_path}: process {os.getpid()} is saving "
            "there; give every run a folder of its own; older saves are as they were"
        )
        with pytest.raises(SaveError, match=re.escape(message)):
            manager.save(trainer.emb, at_step(fresh, 1))
    manager.save(trainer.emb, at_step(fresh, 1))
    with pytest.raises(CheckpointError, match="000000001: exists; a checkpoint is never overwr"):
        manager.save(trainer.emb, at_step(fresh, 1))


@pytest.fixture
def files_of_at_most_512_bytes() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_touches_nothing_older(
    tmp_path: pathlib.Path,
    trainer: Any,
    fresh: Any,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = js.CheckpointManager(tmp_path, keep=1)
    manager.save(trainer.emb, at_step(fresh, 1))
    monkeypatch.setattr("jaxsparse.ckpt.saves.free_bytes", lambda _: 1000)
    message = r"000000002: cannot be saved: it needs [\d,]+ bytes and 1,000 are free; older saves"
    with pytest.raises(SaveError, match=message):
        manager.save(trainer.emb, at_step(fresh, 2))
    monkeypatch.undo()
    request.getfixturevalue("files_of_at_most_512_bytes")
    with pytest.raises(SaveError, match=r"000000002: cannot be saved: .*older saves are as they"):
        manager.save(trainer.emb, at_step(fresh, 2))
    assert manager.steps() == [1]
    assert not list(tmp_path.glob("*.tmp"))
    got = manager.restore(trainer.emb, copy(fresh)).state
    runs.assert_same(runs.leaves(trainer, got), runs.leaves(trainer, at_step(fresh, 1)))


def test_every_damaged_file_is_named(tmp_path: pathlib.Path, trainer: Any, fresh: Any) -> None:
    manager = js.CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(trainer.emb, at_step(fresh, step), run={"x": 1.5, "y": np.ones(9)})
    hint = f"the save before it is at step 1: move {manager.path(2)} away to go on from there"
    files = sorted(path for path in manager.path(2).rglob("*") if path.is_file())
    assert len(files) > 15
    for path in files:
        whole = path.read_bytes()
        flipped = bytearray(whole)
        if whole:
            flipped[len(whole) // 2] ^= 1
        for content in (whole[: len(whole) // 2], bytes(flipped)):
            if content == whole:
                continue
            path.write_bytes(content)
            with pytest.raises(CheckpointError) as caught:
                manager.restore(trainer.emb, copy(fresh))
            text = str(caught.value)
            named = path.parent if "tables" in path.parts else path
            assert str(named) in text and hint in text, text
            assert "damaged" in text or "cannot be read" in text
        path.write_bytes(whole)
    os.remove(manager.path(2) / "tables/user/rows/0/c.0.0")
    with pytest.raises(CheckpointError, match="user/rows/0: cannot be read, is it damaged"):
        manager.restore(trainer.emb, copy(fresh))
    assert manager.restore(trainer.emb, copy(fresh), step=1).step == 1


def test_folders_that_hold_something_else(tmp_path: pathlib.Path, trainer: Any, fresh: Any) -> None:
    manager = js.CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path}: no checkpoint there")):
        manager.restore(trainer.emb, fresh)
    manager.path(4).mkdir()
    with pytest.raises(CheckpointError, match=r"4: no checkpoint there \(manifest.json is miss"):
        manager.restore(trainer.emb, fresh, step=4)
    (manager.path(4) / "manifest.json").write_text('{"format": 3}')
    with pytest.raises(CheckpointError, match=r"lacks \['checksum', .*'tables'\]; is it of an"):
        manager.restore(trainer.emb, fresh, step=4)
    (manager.path(4) / "manifest.json").write_text('{"arrays": []}')
    with pytest.raises(CheckpointError, match="4: has format None, this version reads 3"):
        manager.restore(trainer.emb, fresh, step=4)
    shutil.rmtree(manager.path(4))
    manager.save(trainer.emb, at_step(fresh, 1))
    os.rename(manager.path(1), manager.path(7))
    with pytest.raises(CheckpointError, match=r"000000007: holds step 1; was it renamed\?"):
        manager.restore(trainer.emb, copy(fresh))


def test_a_folder_that_is_a_file_and_a_file_that_is_gone(
    tmp_path: pathlib.Path, trainer: Any, fresh: Any
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file: cannot be read: Not a directory"):
        js.CheckpointManager(tmp_path / "file").latest()
    manager = js.CheckpointManager(tmp_path)
    manager.save(trainer.emb, at_step(fresh, 1))
    os.remove(manager.path(1) / "run.json")
    with pytest.raises(CheckpointError, match=r"run\.json: cannot be read: No such file"):
        manager.restore(trainer.emb, copy(fresh))


def test_arguments_are_checked(tmp_path: pathlib.Path) -> None:
    for name in ("every", "keep"):
        with pytest.raises(ValueError, match=f"CheckpointManager: {name} must be an int >= 1, got"):
            js.CheckpointManager(tmp_path, **{name: 0})
    with pytest.raises(ValueError, match="mode must be 'max' or 'min', got 'up'"):
        js.CheckpointManager(tmp_path, mode="up")


def test_what_a_run_remembers_has_to_be_plain(
    tmp_path: pathlib.Path, trainer: Any, fresh: Any
) -> None:
    manager = js.CheckpointManager(tmp_path)
    with pytest.raises(TypeError, match=r"run\.a\[1\]: cannot be saved: object <object"):
        manager.save(trainer.emb, fresh, run={"a": [1, object()]})
    with pytest.raises(TypeError, match="run: a key must be a plain str, got 3"):
        manager.save(trainer.emb, fresh, run={3: 1})
    assert manager.steps() == []


def test_two_leaves_of_one_name_are_refused(
    tmp_path: pathlib.Path, trainer: Any, fresh: Any
) -> None:
    one = jnp.zeros(1)
    state = dataclasses.replace(fresh, params={"a.b": one, "a": {"b": one}})
    with pytest.raises(CheckpointError, match=r"two leaves of the state are called 'params\.a\.b'"):
        js.CheckpointManager(tmp_path).save(trainer.emb, state)
