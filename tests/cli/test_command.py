# SPDX-License-Identifier: Apache-2.0
"""The command from end to end, in this process: what it prints, leaves and returns."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
from typing import Any, NamedTuple

import numpy as np
import pytest

import jaxsparse as js
import jaxsparse.cli.check
from jaxsparse.cli import main

KEYS = ("step", "loss", "auc", "logloss", "ne", "calibration", "samples_per_s")

SMALL = (
    "data.train_rows=2000",
    "data.test_rows=500",
    "train.batch_size=250",
    "train.epochs=1",
    "table_defaults.embedding_dim=4",
    "model.bottom=[4]",
    "model.top=[8]",
    "mesh.devices=1",
)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def run(*argv: str) -> int:
    return main(list(argv))


def sets(*assignments: str) -> list[str]:
    return [part for one in assignments for part in ("--set", one)]


def last_json(text: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(text.splitlines()[-1])
    return result


def write_csv(path: pathlib.Path, rows: int, seed: int) -> None:
    """Columns label, user, item, age; a click depends on user and item."""
    rng = np.random.default_rng(seed)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", "user", "item", "age"])
        for user, item in rng.integers(0, 20, (rows, 2)):
            writer.writerow([int((user + item) % 3 == 0), user, item, rng.random()])


FILES = """
[run]
name = "clicks"
[data]
kind = "files"
train = "train.csv"
valid = ["valid.csv.gz"]
[data.columns]
dense = ["age"]
features = { user = "user", thing = { column = "item" } }
[table_defaults]
vocabulary_size = 20
embedding_dim = 4
[tables.user]
optimizer = { kind = "adam", learning_rate = 0.01 }
[features.user]
combiner = "mean"
[model]
top = [8]
[train]
batch_size = 100
epochs = 2
log_every = 3
[mesh]
devices = 3
"""


def write_files(folder: pathlib.Path) -> pathlib.Path:
    write_csv(folder / "train.csv", 600, 0)
    write_csv(folder / "valid.csv.gz", 200, 1)
    path = folder / "run.toml"
    path.write_text(FILES)
    return path


@pytest.fixture
def files(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run's TOML beside its data."""
    folder = tmp_path / "data"
    folder.mkdir()
    return write_files(folder)


class Done(NamedTuple):
    """A command that has run."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        return last_json(self.out)


def captured(*argv: str) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(*argv)
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Done]:
    """The folder of a short synthetic run, and what it printed."""
    folder = tmp_path_factory.mktemp("synthetic") / "run"
    return folder, captured("train", "--run-dir", str(folder), *sets(*SMALL))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Done]:
    """The folder of a run on files, beside its data, and what it printed."""
    folder = tmp_path_factory.mktemp("files")
    path = write_files(folder)
    options = ["--set", f"data.dir={folder}", "--run-dir", str(folder / "run")]
    return folder / "run", captured("train", str(path), *options)


def rows_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


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


def test_a_bad_sample_is_met_as_the_run_says(tmp_path: pathlib.Path) -> None:
    path = write_files(tmp_path)
    shown = captured("plan", str(path), "--set", "train.on_bad_sample=pass")
    assert shown.code == 2 and "train.on_bad_sample" in shown.err


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

    def spoil(emb: Any, state: Any) -> dict[str, Any]:
        leaves = original(emb, state)
        if emb.num_shards > 1 and int(state.step):
            leaves["tables/user/rows"] = leaves["tables/user/rows"] * np.float32(1.5)
        return leaves

    monkeypatch.setattr(jaxsparse.cli.check, "state_leaves", spoil)
    assert run("check", str(files), *sets(f"data.dir={files.parent}")) == 1
    message = (
        "1 device and 3 devices: differ by more than 0.001 of their change: tables/user/rows\n"
    )
    assert capsys.readouterr().out.endswith(message)


# ---- bad input ------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one message of a command that refuses its input."""
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    _, message = err.split("jaxsparse: error: ")
    return message.removesuffix("\n")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("train.epoch=2", "train.epoch: unknown key, did you mean 'epochs'?; known: batch_size, "),
        ("trian.epochs=2", "trian: unknown key, did you mean 'train'?; known: run, data, table_"),
        ("train.epochs=many", "train.epochs: expected an integer, got 'many' (a string)"),
        ("train.epochs=0", "train: epochs must be >= 1, got 0"),
        ("train.patience=2", "train: patience needs keep_best = true"),
        ("train.keep_best=true", "train.keep_best needs data.valid, the files it chooses by"),
        ("run.name=a/b", "run: name must be the name of a folder, got 'a/b'"),
        ("run.seed=-1", "run: seed must be in 0..4294967295, got -1"),
        ("mesh.devices=0", "mesh: devices must be >= 1, got 0"),
        (
            "data.kind=sinthetic",
            "data.kind: expected one of synthetic, files, criteo, did you mean",
        ),
        ("data.test_rows=0", "data: test_rows must be >= 1, got 0"),
        ("optimizer.kind=adan", "optimizer.kind: expected one of adam, adagrad, sgd, did you"),
        ("optimizer.learning_rate=-1", "optimizer: learning_rate must be >= 0, got -1"),
        ("optimizer.b1=1", "optimizer: b1 must be >= 0 and < 1, got 1"),
        ("model.kind=deepfm", "model.kind: expected one of dlrm, got 'deepfm'"),
        (
            "features.usr.combiner=mean",
            "features.usr: not among the feature columns of the data, did you mean 'user'?",
        ),
        (
            "tables.usr.vocabulary_size=3",
            "tables.usr: not among the tables that features look up, did you mean 'user'?",
        ),
        (
            "tables.user.embedding_dim=8",
            "DLRM: dot products need one embedding dim for all features, got {",
        ),
        ("model.bottom=[7]", "DLRM: the bottom MLP must end in the embedding dim 16, got (7,)"),
        (
            "tables.user.placement=everywhere",
            "tables.user.placement: expected one of auto, sharded, replicated, single, got",
        ),
        ("tables.user.vocabulary_size=0", "TableSpec 'user': vocabulary_size must be a positive"),
        ("mesh.devices=9", "mesh.devices: 9 asked for, 8 there; --devices forces that many CPU"),
        ("mesh.nodes=3", "make_mesh: nodes must divide the number of devices 8, got 3"),
        ("data.config.num_dense=-1", "data.config: SyntheticConfig: num_dense must be >= 0"),
    ],
)
def test_a_wrong_configuration_is_refused(
    assignment: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "train", "--set", *SMALL[:3], assignment)
    assert os.listdir() == [], "nothing may be left behind"


def test_the_file_is_named(files: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "train", str(files), "--set", "train.epoch=2")
    assert message.startswith(f"{files}: train.epoch: unknown key")
    assert refused(capsys, "train", "none.toml") == "none.toml: no such file"
    files.write_text("[data\n")
    assert f"{files}: not a TOML file: " in refused(capsys, "train", str(files))
    files.write_text("[run]\n")
    message = f"{files}: data: is missing, expected a table"
    assert refused(capsys, "train", str(files)) == message
    text = FILES.replace("vocabulary_size = 20\n", "")
    files.write_text(text)
    message = f"{files}: tables.user.vocabulary_size: is missing, expected the number of rows"
    assert refused(capsys, "plan", str(files)) == message
    files.write_text(FILES.replace('valid = ["valid.csv.gz"]\n', ""))
    message = "data.test: is missing, and so is data.valid: nothing to evaluate on"
    assert message in refused(capsys, "train", str(files), *sets(f"data.dir={files.parent}"))


def test_a_missing_data_file_is_named(
    files: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, "train", str(files), "--set", "data.dir=elsewhere")
    assert message == f"{pathlib.Path.cwd()}/elsewhere/train.csv: no such file (data.train)"
    (files.parent / "valid.csv.gz").unlink()
    message = refused(capsys, "train", str(files), "--set", f"data.dir={files.parent}")
    assert message == f"{files.parent}/valid.csv.gz: no such file (data.valid)"
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0,1,20,0.5", "train.csv, line 602: feature column 'item' must be in 0..19, got '20'"),
        ("0,-1,2,0.5", "train.csv, line 602: feature column 'user' must be in 0..19, got '-1'"),
        ("2,1,2,0.5", "label"),
        ("0,1,2", "line 602"),
        ("0,1,2,nan", "age"),
    ],
)
def test_bad_rows_are_refused_before_a_step(
    line: str, message: str, files: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (files.parent / "train.csv").open("a") as file:
        file.write(line + "\r\n")
    assert message in refused(capsys, "train", str(files), *sets(f"data.dir={files.parent}"))
    assert os.listdir() == []


def test_the_bag_of_a_bad_key_is_named(
    files: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = files.parent
    for name in ("train.csv", "valid.csv"):
        (folder / name).write_text("label,user,item,age\n0,1,3|4,0\n1,2,,0\n0,3,5|20|6,0\n")
    options = sets(
        f"data.dir={folder}",
        "data.valid=valid.csv",
        "data.columns.features.thing={column='item', separator='|'}",
    )
    message = "train.csv, line 4: feature column 'item' must be keys between '|', each in 0..19, "
    message += "got '5|20|6'"
    assert message in refused(capsys, "train", str(files), *options)
    assert run("train", str(files), *options, "--set", "features.thing.padding_id=20") == 0
    options += sets("tables.thing.keys={kind='identity', out_of_range='ignore'}")
    assert run("train", str(files), *options) == 0


def test_strings_need_hashed_keys(files: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = sets(
        f"data.dir={files.parent}", "data.columns.features.thing={column='item', type='string'}"
    )
    message = refused(capsys, "train", str(files), *options)
    assert message.endswith(
        "feature 'thing': its keys are strings, and table 'thing' takes integers as rows; "
        'set its keys = { kind = "hashed" }'
    )
    assert run("train", str(files), *options, *sets("tables.thing.keys={kind='hashed'}")) == 0


def test_wrong_arguments_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trian") == 2
    assert "trian" in capsys.readouterr().err
    assert run("train", "--jsno") == 2
    assert "--jsno" in capsys.readouterr().err
    assert run() == 2
    capsys.readouterr()
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("train", "eval", "plan", "check"))


def test_run_folders_that_cannot_serve(
    capsys: pytest.CaptureFixture[str], synthetic: tuple[pathlib.Path, Done]
) -> None:
    folder, _ = synthetic
    message = (
        f"{folder}: holds a run; give --run-dir a new folder, or go on with it by --resume auto"
    )
    assert refused(capsys, "train", "--run-dir", str(folder), "--set", *SMALL) == message
    pathlib.Path("file").write_text("")
    message = "file: is a file, expected a folder or a name for a new one"
    assert refused(capsys, "train", "--run-dir", "file", "--set", *SMALL) == message
    message = "none: is not the folder of a run (config.toml is missing)"
    assert refused(capsys, "eval", "none") == message
    message = refused(capsys, "eval", str(folder), *sets("tables.user.vocabulary_size=20001"))
    assert "tables/user/rows: saved float32[20000, 4], wanted float32[20001, 4]" in message
    shutil.copytree(folder, "copy")
    os.rename("copy/checkpoints/000000008", "copy/checkpoints/000000008.tmp")
    message = "copy: has no checkpoint; did the training come to a save?"
    assert refused(capsys, "eval", "copy") == message


def test_check_needs_two_devices(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "check", "--set", "mesh.devices=1")
    assert "check compares one device with several and only one is there" in message
    assert "--devices 4 forces four CPU devices" in message


def test_devices_that_cannot_be_forced(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "check", "--devices", "0") == "--devices: must be >= 1, got 0"
    message = "--devices: must be in 1..65,536, got 0"
    assert refused(capsys, "plan", "--devices", "0") == message
    message = "--devices: must be in 1..65,536, got 1,000,000,000"
    assert refused(capsys, "plan", "--devices", "1000000000") == message
    message = "--devices: 9 asked for, but jax has started with 8"
    assert refused(capsys, "check", "--devices", "9") == message


def test_a_training_that_diverges_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--set", *SMALL, "optimizer={kind='sgd', learning_rate=1e30}") == 1
    err = capsys.readouterr().err
    assert "jaxsparse: failed: step " in err and "are not finite" in err
    assert "Traceback" not in err


def test_anything_unforeseen_is_a_failure_with_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr("jaxsparse.cli.commands.run_plan", fail)
    assert run("plan") == 1
    assert "Traceback" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        ("model.top=[0]", "top must hold widths >= 1, got [0]"),
        ("model.bottom=[-1, 16]", "bottom must hold widths >= 1, got [-1, 16]"),
        (f"run.seed={10**30}", "seed must be in 0..4294967295"),
        ("data.seed=-1", "seed must be in 0..4294967295, got -1"),
    ],
)
def test_values_out_of_range_are_refused(assignment: str, text: str) -> None:
    done = captured("plan", "--set", assignment)
    assert done.code == 2
    assert text in done.err


def test_what_no_exchange_can_take_is_bad_input(tmp_path: pathlib.Path) -> None:
    options = ["data.train_rows=2000", "data.test_rows=500", "mesh.capacity=1", "mesh.devices=1"]
    done = captured("train", "--set", *options, "--run-dir", str(tmp_path / "run"))
    assert done.code == 2
    assert "rung 1 is below the need" in done.err and "Traceback" not in done.err
