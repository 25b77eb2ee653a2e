# SPDX-License-Identifier: Apache-2.0
"""Runs that are interrupted and taken up, looked at, and started from rows of files."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
from typing import Any

import numpy as np
import pytest

import jaxsparse.cli.train
from jaxsparse.cli import main
from tests.ckpt import runs

SETS = (
    "data.train_rows=2000",
    "data.test_rows=500",
    "train.batch_size=250",
    "train.epochs=2",
    "train.log_every=3",
    "table_defaults.embedding_dim=4",
    "model.bottom=[4]",
    "model.top=[8]",
    "mesh.devices=1",
    "checkpoint.every=5",
)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def result(out: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(out.splitlines()[-1])
    return parsed


def interrupt_at(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """SIGTERM comes when that batch of the training data is drawn, some steps before its own."""
    load = jaxsparse.cli.train.load_split

    def loaded(config: Any, name: Any, features: Any) -> Any:
        split = load(config, name, features)
        if name == "train":
            take = split.dataset._batches

            def batches(*position: int) -> Any:
                for count, item in enumerate(take(*position), 1):
                    if count == batch:
                        os.kill(os.getpid(), signal.SIGTERM)
                    yield item

            monkeypatch.setattr(split.dataset, "_batches", batches)
        return split

    monkeypatch.setattr(jaxsparse.cli.train, "load_split", loaded)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", "--run-dir", str(folder), "--set", *SETS]) == 0
    return folder


@pytest.mark.slow
def test_sigterm_exits_0_and_resume_ends_as_if_it_had_not_been(
    whole: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("train", "--run-dir", "a", "--resume", "auto", "--json")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 7)
        code, out, err = run(capsys, *command, "--set", *SETS)
    assert code == 0
    step = result(out)["step"]
    assert 0 < step <= 7
    assert result(out) == {"step": step, "interrupted": True, "run_dir": "a"}
    assert f"interrupted and saved at step {step}; go on with --resume must" in err
    code, out, err = run(capsys, "train", "--run-dir", "a", "--resume", "must")
    assert code == 0 and f"resumed at step {step}" in err
    assert "another configuration" not in err
    rows = [runs.rows_of(folder / "metrics.jsonl") for folder in (pathlib.Path("a"), whole)]
    assert runs.without_times(rows[0]) == runs.without_times(rows[1])
    code, want, _ = run(capsys, "eval", str(whole), "--json")
    for name in ("step", "loss", "auc", "logloss", "ne", "calibration"):
        assert result(out)[name] == result(want)[name], name


def test_runs_to_resume_that_are_not_there(
    whole: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "train", "--run-dir", "no", "--resume", "must", "--set", *SETS)
    assert code == 2 and "no: holds no run to go on with (--resume must)" in err
    shutil.copytree(whole, "a", symlinks=True)
    shutil.rmtree("a/checkpoints")
    code, out, err = run(capsys, "train", "--run-dir", "a", "--resume", "auto", "--json")
    assert code == 0 and "resumed" not in err and result(out)["step"] == 16
    assert "a: has no save to go on from, starts at step 0" in err
    rows = [runs.rows_of(folder / "metrics.jsonl") for folder in (pathlib.Path("a"), whole)]
    assert runs.without_times(rows[0]) == runs.without_times(rows[1])


def test_a_changed_configuration_is_told_and_kept(
    whole: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, "a", symlinks=True)
    options = ("--run-dir", "a", "--resume", "must", "--json", "--set", "train.epochs=3")
    code, out, err = run(capsys, "train", *options)
    assert code == 0 and result(out)["step"] == 24
    assert "another configuration than the run had: train.epochs: 2 -> 3" in err
    assert "epochs = 3" in pathlib.Path("a/config.toml").read_text()
    before = pathlib.Path("a/config.toml").read_text()
    code, _, err = run(capsys, "train", *options, "tables.user.vocabulary_size=30000")
    assert code == 2 and "does not fit the state" in err
    assert "tables/user: vocabulary_size was 20000, is 30000" in err
    assert pathlib.Path("a/config.toml").read_text() == before


def test_inspect_shows_what_is_saved(
    whole: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "inspect", str(whole))
    told = result(out)
    assert code == 0 and (told["step"], told["steps"]) == (16, [10, 15, 16])
    assert "tables/user/rows" in out and "float32[20000, 4]" in out
    assert f"step        16  {told['bytes']:>15,} bytes" in out
    assert told["leaves"]["dense/step"] == [[], "int32"]
    code, out, _ = run(capsys, "inspect", str(whole / "checkpoints"), "--step", "10", "--json")
    assert code == 0 and len(out.splitlines()) == 1 and result(out)["step"] == 10
    code, _, err = run(capsys, "inspect", str(whole), "--step", "11")
    assert code == 2 and "no save at step 11; there are [10, 15, 16]" in err
    code, _, err = run(capsys, "inspect", "nothing")
    assert code == 2 and "nothing: has no checkpoint" in err


def test_rows_go_from_one_run_to_another(
    whole: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "export", str(whole), "user", "user.npz")
    assert code == 0 and result(out)["rows"] == 20_000 and "20,000 rows of user of" in err
    code, out, err = run(
        capsys, "import", str(whole / "config.toml"), "user=user.npz", "--run-dir", "a"
    )
    assert code == 0 and result(out) == {"step": 0, "rows": {"user": 20_000}, "run_dir": "a"}
    assert "train it with: jaxsparse train --run-dir a --resume must" in err
    assert run(capsys, "export", "a", "user", "again.npz")[0] == 0
    with np.load("user.npz") as want, np.load("again.npz") as got:
        for name in ("keys", "vectors"):
            np.testing.assert_array_equal(got[name], want[name])
    code, out, err = run(capsys, "train", "--run-dir", "a", "--resume", "must", "--json")
    assert code == 0 and "resumed at step 0" in err and result(out)["step"] == 16
    config = str(whole / "config.toml")
    code, _, err = run(capsys, "import", config, "user", "--run-dir", "b")
    assert code == 2 and "'user': expected TABLE=FILE with a table of ['country', " in err
    code, _, err = run(capsys, "import", config, "user=none.npz", "--run-dir", "b")
    assert code == 2 and "none.npz: cannot be read" in err and not pathlib.Path("b").exists()
    assert run(capsys, "export", str(whole), "user", "a.npz", "--step", "10")[0] == 0


def test_a_save_that_fails_exits_1(whole: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pathlib.Path("a/checkpoints").mkdir(parents=True)
    pathlib.Path("a/checkpoints/000000005.tmp").write_text("in the way")
    code, _, err = run(capsys, "train", "--run-dir", "a", "--set", *SETS)
    assert code == 1 and "jaxsparse: failed: " in err and "000000005: cannot be saved: " in err


def test_must_needs_a_save(whole: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pathlib.Path("a").mkdir()
    shutil.copy(whole / "config.toml", "a")
    code, _, err = run(capsys, "train", "--run-dir", "a", "--resume", "must")
    assert code == 2
    assert "a: has no save to go on from (--resume must); --resume auto starts it anew" in err


@pytest.mark.parametrize("saved", [True, False])
def test_ctrl_c_says_what_is_saved(
    saved: bool,
    whole: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(whole, "a", symlinks=True)
    if not saved:
        shutil.rmtree("a/checkpoints")

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(jaxsparse.cli.train, "_fit", interrupted)
    code, _, err = run(capsys, "train", "--run-dir", "a", "--resume", "auto")
    assert code == 1 and err.endswith("jaxsparse: failed: interrupted\n")
    told = "saved at step 16; go on with --run-dir a --resume must"
    nothing = "nothing was saved yet; checkpoint.every is "
    assert (told in err, nothing in err) == (saved, not saved)
