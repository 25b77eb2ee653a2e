# SPDX-License-Identifier: Apache-2.0
"""What the command refuses: bad configurations, files, rows, folders and arguments."""

from __future__ import annotations

import os
import pathlib
import shutil

import pytest

from tests.cli.commands import (
    FILES,
    SMALL,
    Done,
    captured,
    run,
    sets,
    write_files,
)

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one message of a command that refuses its input."""
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    _, message = err.split("jaxsparse: error: ")
    return message.removesuffix("\n")


def test_a_bad_sample_is_met_as_the_run_says(tmp_path: pathlib.Path) -> None:
    path = write_files(tmp_path)
    shown = captured("plan", str(path), "--set", "train.on_bad_sample=pass")
    assert shown.code == 2 and "train.on_bad_sample" in shown.err


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
