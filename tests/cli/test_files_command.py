# SPDX-License-Identifier: Apache-2.0
"""Runs on files: streamed, in memory that they do not enlarge, bad rows refused or counted."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxsparse.cli import main
from tests import job
from tests.data.files import criteo_bytes, criteo_cells
from tests.peak_memory import assert_peaks_are_equal

RUN = """
[data]
kind = "files"
train = "train*.csv"
test = "test.csv"
columns = { dense = ["age"], features = { user = "user", item = "item" } }
[table_defaults]
vocabulary_size = 20
embedding_dim = 4
[model]
top = [8]
[train]
batch_size = 100
log_every = 2
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_csv(name: str, rows: int, seed: int, bad: tuple[str, ...] = ()) -> None:
    rng = np.random.default_rng(seed)
    lines = ["label,user,item,age"]
    for user, item in rng.integers(0, 20, (rows, 2)):
        lines.append(f"{int((user + item) % 3 == 0)},{user},{item},{rng.random():.3f}")
    pathlib.Path(name).write_text("\n".join([*lines[:2], *bad, *lines[2:]]) + "\n")


def write_run(*bad: str) -> str:
    write_csv("train_a.csv", 250, 0, bad)
    write_csv("train_b.csv", 150, 1)
    write_csv("test.csv", 120, 2, bad[:1])
    pathlib.Path("run.toml").write_text(RUN)
    return "run.toml"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[dict[str, Any], str, str]:
    code = main(list(argv))
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out.splitlines()[-1]), out, err


def rows_of(folder: str) -> list[dict[str, Any]]:
    path = pathlib.Path(folder, "metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


BAD = ("0,20,3,0.5", "0,1,2", "0,21,3,0.5")
REASONS = {"feature column 'user' must be in 0..19": 2, "number of columns": 1}


def test_patterns_are_streamed_and_waiting_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    result, _, err = run(capsys, "train", write_run(), "--set", "mesh.devices=1")
    assert result["step"] == 4 and result["num_samples"] == 120
    assert 0 <= result["input_wait"] <= 1 and "skipped_rows" not in result
    assert "400 rows to train on, 120 to judge by" in err and "input wait " in err
    rows = [row for row in rows_of("runs/run") if row["kind"] == "train"]
    assert len(rows) == 2
    for row in rows:
        assert 0 <= row["input_wait"] <= 1 and "skipped_rows" not in row


def test_bad_rows_are_skipped_and_counted_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(*BAD)
    options = ["--on-bad-row", "skip", "--set", "mesh.devices=1"]
    result, out, err = run(capsys, "train", path, *options)
    assert result["skipped_rows"] == {
        "train": REASONS,
        "test": {"feature column 'user' must be in 0..19": 1},
    }
    assert result["step"] == 4 and result["num_samples"] == 120
    assert (
        "  skipped of train: 2 (feature column 'user' must be in 0..19), 1 (number of columns)"
    ) in out.splitlines()
    assert "train: 2 rows skipped, feature column 'user' must be in 0..19; first: " in err
    assert "train_a.csv, line 3: feature column 'user' must be in 0..19, got '20'" in err
    assert all(row["skipped_rows"] == REASONS for row in rows_of("runs/run"))
    evaluated, out, _ = run(capsys, "eval", "runs/run")
    assert evaluated["skipped_rows"] == {"test": result["skipped_rows"]["test"]}
    assert evaluated["loss"] == pytest.approx(result["loss"], rel=1e-6)
    assert main(["eval", "runs/run", "--on-bad-row", "error"]) == 2
    assert "test.csv, line 3: feature column 'user' must be in" in capsys.readouterr().err


def test_bad_lines_of_criteo_are_skipped_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    lines = criteo_bytes(criteo_cells(60)).splitlines()
    pathlib.Path("train.tsv").write_bytes(b"\n".join([b"2" + lines[0][1:], b"x", *lines]) + b"\n")
    pathlib.Path("test.tsv").write_bytes(b"\n".join(lines) + b"\n")
    pathlib.Path("run.toml").write_text(
        '[data]\nkind = "criteo"\ntrain = "train.tsv"\ntest = "test.tsv"\n'
        '[table_defaults]\nvocabulary_size = 50\nembedding_dim = 4\nkeys = {kind = "hashed"}\n'
        "[train]\nbatch_size = 20\n[mesh]\ndevices = 1\n"
    )
    assert main(["train", "run.toml"]) == 2
    assert "train.tsv, line 1: label must be 0 or 1, got '2'" in capsys.readouterr().err
    result, _, _ = run(capsys, "train", "run.toml", "--set", "data.on_bad_row=skip")
    assert result["skipped_rows"] == {"train": {"label": 1, "number of columns": 1}, "test": {}}
    assert result["step"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on-bad-row", "skip"], "data.train: there are no rows, 2 were skipped"),
        (["--on-bad-row", "error"], "line 2: feature column 'user' must be in 0..19"),
        (["--set", "data.train=none*.csv"], "none*.csv: no file matches (data.train)"),
        (["--set", "data.on_bad_row=ignore"], "data.on_bad_row: expected one of error, skip"),
        (["--set", "data.shuffle_rows=0"], "data: shuffle_rows must be >= 1, got 0"),
    ],
)
def test_what_cannot_be_trained_on_leaves_nothing(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run()
    for name in ("train_a.csv", "train_b.csv"):
        pathlib.Path(name).write_text("label,user,item,age\n0,20,1,0\n")
    assert main(["train", path, *options]) == 2
    assert message in capsys.readouterr().err
    assert not pathlib.Path("runs").exists()


def test_a_generated_log_has_no_bad_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--on-bad-row", "skip"]) == 2
    assert "data.on_bad_row: unknown key" in capsys.readouterr().err


def test_a_later_bad_row_ends_the_run_where_it_is_met(capsys: pytest.CaptureFixture[str]) -> None:
    """Only the first window of rows is read before a run begins; what it saved stays."""
    path = write_run(*BAD)
    pathlib.Path("train_a.csv").rename("train_c.csv")
    write_csv("test.csv", 120, 2)
    options = ["data.shuffle_rows=100", "train.shuffle=false", "mesh.devices=1"]
    saves = ["checkpoint.every=1"]
    assert main(["train", path, "--set", *options, *saves]) == 2
    assert "train_c.csv, line 3: feature column 'user' must be in" in capsys.readouterr().err
    names = [p.name for p in pathlib.Path("runs/run/checkpoints").iterdir()]
    assert "000000001" in names


@pytest.mark.slow
def test_two_processes_stream_what_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run()
    options = ["--json", "--set", "table_defaults.placement=sharded", "train.epochs=2"]
    alone, _, _ = run(capsys, "train", path, *options, "mesh.devices=4")
    root = pathlib.Path(__file__).parents[2]
    command = ["-m", "jaxsparse", "train", path, *options]
    done = job.run(command, 2, 2, env={**os.environ, "PYTHONPATH": str(root)})
    assert done.returncode == 0, done.stderr
    together = json.loads(done.stdout.splitlines()[-1])
    for name in ("step", "num_samples"):
        assert together[name] == alone[name]
    for name in ("loss", "auc"):
        assert together[name] == pytest.approx(alone[name], rel=1e-5)


MEMORY_SCRIPT = """
import sys, tempfile
from jaxsparse.cli import main
folder = tempfile.mkdtemp() + "/run"  # a new one every round
assert main(["train", "run.toml", "--run-dir", folder, "--set", "data.train=" + sys.argv[1]]) == 0
print("ok")
"""


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_memory_of_a_run_does_not_grow_with_its_files() -> None:
    text = RUN.replace("batch_size = 100", "batch_size = 8192")
    text = text.replace('dense = ["age"], ', "").replace("log_every = 2", "log_every = 50")
    text = text.replace('test = "test.csv"', 'test = "1.parquet"\nshuffle_rows = 32_768')
    pathlib.Path("run.toml").write_text(text + "[mesh]\ndevices = 1\n")
    for times in (1, 10):
        rows = 300_000 * times
        rng = np.random.default_rng(times)
        columns = {name: rng.integers(0, 20, rows) for name in ("user", "item")}
        table = pa.table({"label": rng.integers(0, 2, rows), **columns})
        parquet.write_table(table, f"{times}.parquet", row_group_size=20_000)
    root = pathlib.Path(__file__).parents[2]
    assert_peaks_are_equal(
        MEMORY_SCRIPT,
        ("1.parquet",),
        ("10.parquet",),
        cwd=pathlib.Path.cwd(),
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"},
    )


def test_other_dense_columns_than_were_trained_on_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = "".join(f"{i % 2},{i % 3},{i % 5},{i % 7}\n" for i in range(40))
    pathlib.Path("a.csv").write_text(f"label,user,x,y\n{rows}")
    columns = '{ dense = ["x", "y"], features = { user = "user" } }'
    pathlib.Path("run.toml").write_text(
        f'[data]\nkind = "files"\ntrain = "a.csv"\ntest = "a.csv"\ncolumns = {columns}\n'
        "[table_defaults]\nvocabulary_size = 20\nembedding_dim = 4\n[model]\ntop = [8]\n"
        "[train]\nbatch_size = 20\n[mesh]\ndevices = 1\n"
    )
    run(capsys, "train", "run.toml", "--run-dir", "a")
    before = pathlib.Path("a/config.toml").read_text()
    swapped = ("--set", 'data.columns.dense=["y","x"]')
    for command in (
        ("train", "--run-dir", "a", "--resume", "must"),
        ("eval", "a"),
        ("predict", "a", "--out", "p.csv"),
        ("predict", "run.toml", "--run-dir", "a", "--out", "p.csv"),
    ):
        assert main([*command, *swapped]) == 2
        assert (
            "error: a: its dense columns were ['x', 'y'], now they are ['y', 'x']; name those it "
            "was trained on, in their order (data.columns.dense), or train a new run"
        ) in capsys.readouterr().err
    assert pathlib.Path("a/config.toml").read_text() == before
    assert not pathlib.Path("p.csv").exists()
    run(capsys, "train", "--run-dir", "a", "--resume", "must", "--set", "train.epochs=2")
