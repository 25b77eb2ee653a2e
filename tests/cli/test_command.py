# SPDX-License-Identifier: Apache-2.0
"""The command from end to end, in this process: what it prints, leaves and returns."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tomllib
from typing import Any

import numpy as np
import pytest

import jaxsparse as js
import jaxsparse.cli.check
from tests.cli.commands import (
    SMALL,
    Done,
    captured,
    rows_of,
    run,
    sets,
    write_files,
)

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

KEYS = ("step", "loss", "auc", "logloss", "ne", "calibration", "samples_per_s")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Done]:
    """The folder of a run on files, beside its data, and what it printed."""
    folder = tmp_path_factory.mktemp("files")
    path = write_files(folder)
    options = ["--set", f"data.dir={folder}", "--run-dir", str(folder / "run")]
    return folder / "run", captured("train", str(path), *options)


def test_train_without_a_file_runs_the_synthetic_example(
    synthetic: tuple[pathlib.Path, Done],
) -> None:
    folder, done = synthetic
    assert done.code == 0
    assert set(KEYS) <= set(done.result)
    assert done.result["step"] == 8 and done.result["num_samples"] == 500
    assert done.result["split"] == "test" and done.result["run_dir"] == str(folder)
    assert 0.8 < done.result["best_auc"] < 0.9
    assert 0.3 < done.result["auc"] < done.result["best_auc"]
    best, reached = (f"{done.result[name]:.4f}"[1:] for name in ("best_auc", "auc"))
    assert f"best reachable AUC {best}   reached {reached}" in done.out.splitlines()[-2]
    assert "2,000 rows to train on, 500 to judge by" in done.err
    assert "train step       8/8" in done.err
    left = sorted(p.name for p in folder.iterdir())
    (events,) = [name for name in left if name.startswith("events.out.tfevents.")]
    assert left == [
        "checkpoints",
        "config.toml",
        events,
        "metrics.jsonl",
        "training.png",
    ]
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
    assert rows_of(folder)[-1]["step"] == 8


def test_json_prints_one_line_and_every_run_takes_a_new_folder() -> None:
    done = [captured("train", "--json", "--set", *SMALL) for _ in range(2)]
    assert [len(d.out.splitlines()) for d in done] == [1, 1]
    assert [d.result["run_dir"] for d in done] == ["runs/synthetic", "runs/synthetic-2"]
    assert done[0].result["loss"] == done[1].result["loss"]


def test_the_config_of_a_run_is_complete_and_runs_again_alike(
    trained: tuple[pathlib.Path, Done],
) -> None:
    folder, done = trained
    written = tomllib.loads((folder / "config.toml").read_text())
    assert written["data"]["dir"] == str(folder.parent)
    assert written["tables"]["user"]["optimizer"]["kind"] == "adam"
    assert written["tables"]["thing"] == {
        "vocabulary_size": 20,
        "embedding_dim": 4,
        "placement": "auto",
        "dtype": "float32",
        "trainable": True,
        "optimizer": {
            "kind": "adagrad",
            "learning_rate": 0.05,
            "initial_accumulator": 0.1,
            "eps": 1e-8,
            "l2": 0.0,
            "weight_decay": 0.0,
            "catch_up_decay": False,
        },
        "keys": {"kind": "identity", "out_of_range": "error"},
        "initializer": {"kind": "uniform", "scale": 0.05},
    }
    assert written["features"]["user"] == {
        "table": "user",
        "combiner": "mean",
        "truncate": "error",
    }
    again = captured("train", str(folder / "config.toml"), "--run-dir", "again")
    assert again.code == 0
    changing = {"run_dir": "", "samples_per_s": 0, "input_wait": 0}
    assert {**again.result, **changing} == {**done.result, **changing}


def test_files_are_trained_and_judged_on_valid_without_a_test_file(
    trained: tuple[pathlib.Path, Done],
) -> None:
    folder, done = trained
    assert done.result["step"] == 12 and done.result["split"] == "valid"
    assert done.result["num_samples"] == 200
    assert "best_auc" not in done.result and "  AUC " in done.out
    evals = [row for row in rows_of(folder) if row["kind"] == "eval"]
    assert [row["step"] for row in evals] == [6, 12]
    assert evals[-1]["auc"] == done.result["auc"]


def test_keep_best_keeps_the_best_state(files: pathlib.Path) -> None:
    options = (
        f"data.dir={files.parent}",
        "train.keep_best=true",
        "train.patience=2",
        "train.epochs=30",
        "table_defaults.optimizer={kind='adam', learning_rate=0.3}",
        "optimizer={kind='adam', learning_rate=0.1}",
    )
    done = captured("train", str(files), *sets(*options))
    folder = pathlib.Path("runs/clicks")
    evals = [row for row in rows_of(folder) if row["kind"] == "eval"]
    best = max(evals, key=lambda row: row["auc"])
    assert (done.result["step"], done.result["auc"]) == (best["step"], best["auc"])
    assert evals[-1]["step"] == best["step"] + 12 < 180, "patience stops two epochs later"
    assert f"best on valid: AUC {best['auc']:.4f} at step {best['step']}" in done.err
    manager = js.CheckpointManager(folder / "checkpoints", best="auc")
    assert manager.best_step() == best["step"] < manager.latest()


@pytest.mark.parametrize("devices", [1, 8])
def test_eval_reloads_the_final_state_on_any_mesh(
    devices: int, trained: tuple[pathlib.Path, Done]
) -> None:
    folder, done = trained
    evaluated = captured("eval", str(folder), *sets(f"mesh.devices={devices}"))
    assert evaluated.code == 0 and "after 12 steps" in evaluated.out
    for name in ("step", "loss", "auc", "logloss", "ne", "calibration", "num_samples"):
        assert evaluated.result[name] == pytest.approx(done.result[name], rel=1e-6), name


def test_eval_of_the_synthetic_run_knows_the_best_auc(
    synthetic: tuple[pathlib.Path, Done],
) -> None:
    folder, done = synthetic
    evaluated = captured("eval", str(folder), "--json")
    assert evaluated.result["best_auc"] == done.result["best_auc"]
    assert len(evaluated.out.splitlines()) == 1


def test_plan_reads_no_data_and_needs_no_devices(
    files: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = sets("data.dir=nowhere", "tables.user.vocabulary_size=10_000_000_000")
    assert run("plan", str(files), *options, "--devices", "64") == 0
    out = capsys.readouterr().out
    assert "2 tables in 2 slabs on 64 devices" in out
    assert re.search(r"user +sharded +10,000,000,000", out)
    assert run("plan") == 0
    assert "10 tables in 2 slabs on 8 devices" in capsys.readouterr().out
    assert os.listdir() == []


def test_check_agrees_and_names_every_leaf(
    files: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", str(files), *sets(f"data.dir={files.parent}")) == 0
    out = capsys.readouterr().out
    assert not re.search(r"0\.00e\+00 +0\.00e\+00", out), "what did not change is counted"
    assert re.search(r"^\d+ more that the steps did not change, equal on both$", out, re.M)
    for leaf in ("tables/user/rows", "tables/thing/slot.accumulator", "dense/params.logit.kernel"):
        assert re.search(rf"^{re.escape(leaf)} +[0-9.e+-]+ +[0-9.e+-]+ +[0-9.e+-]+$", out, re.M)
    assert re.search(
        r"1 device and 3 devices: all \d+ leaves agree within 0.001 of their change", out
    )


def test_check_fails_where_a_mesh_loses_something(
    files: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = jaxsparse.cli.check.state_leaves

    def spoil(emb: Any, *state: Any) -> dict[str, Any]:
        leaves = original(emb, *state)
        if emb.num_shards > 1 and int(state[0].step):
            leaves["tables/user/rows"] = leaves["tables/user/rows"] * np.float32(1.5)
        return leaves

    monkeypatch.setattr(jaxsparse.cli.check, "state_leaves", spoil)
    assert run("check", str(files), *sets(f"data.dir={files.parent}")) == 1
    message = (
        "1 device and 3 devices: differ by more than 0.001 of their change: tables/user/rows\n"
    )
    assert capsys.readouterr().out.endswith(message)


@pytest.mark.slow
def test_check_forces_devices_in_a_process_of_its_own(
    files: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    options = ["--devices", "4", *sets(f"data.dir={files.parent}", "mesh.devices=4")]
    done = subprocess.run(
        [sys.executable, "-m", "jaxsparse", "check", str(files), *options],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "1 device and 4 devices: all" in done.stdout
