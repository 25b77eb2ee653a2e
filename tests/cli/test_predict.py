# SPDX-License-Identifier: Apache-2.0
"""``jaxsparse predict``: one row for every row, in order, of any save."""

from __future__ import annotations

import csv
import os
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import jaxsparse as js
from tests.cli.commands import SMALL, Done, captured, rows_of, sets, write_files


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of a run of twelve steps that kept its best state; its data are beside it."""
    folder = tmp_path_factory.mktemp("predict")
    options = sets(f"data.dir={folder}", "train.keep_best=true", "train.eval_batch_size=64")
    done = captured(
        "train", str(write_files(folder)), "--run-dir", str(folder / "run"), "--json", *options
    )
    assert done.code == 0, done.err
    return folder / "run"


def predict(*argv: object) -> Done:
    return captured("predict", *map(str, argv))


def columns(path: str) -> dict[str, Any]:
    table = pa.parquet.read_table(path)
    return {name: table.column(name).to_numpy() for name in table.column_names}


def cells_of(path: pathlib.Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_is_predicted_in_order(run: pathlib.Path) -> None:
    done = predict(run, "--out", "p.parquet")
    assert done.code == 0 and done.result["rows"] == 200
    assert f"200 predictions of valid by step {done.result['step']} are in p.parquet" in done.err
    found = columns("p.parquet")
    assert list(found) == ["probability", "logit"]
    assert len(found["logit"]) == 200, "the last batch has 8 rows, none is padding"
    np.testing.assert_allclose(
        found["probability"], 1 / (1 + np.exp(-found["logit"].astype(float))), rtol=1e-5
    )
    evaluated = captured("eval", str(run), "--json")
    import gzip

    with gzip.open(run.parent / "valid.csv.gz", "rt") as file:
        labels = np.array([float(row["label"]) for row in csv.DictReader(file)])
    auc = js.StreamingAUC()
    auc.update(found["logit"], labels)
    assert auc.result() == pytest.approx(evaluated.result["auc"], abs=1e-6)


def test_data_without_labels_and_in_other_files_are_predicted_alike(run: pathlib.Path) -> None:
    assert predict(run, "--split", "train", "--out", "p.parquet").code == 0
    rows = cells_of(run.parent / "train.csv")
    names = ["user", "item", "age"]
    for number, part in enumerate((rows[:250], rows[250:])):
        with open(f"{number}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(part)
    table = pa.table(
        {name: [(float if name == "age" else int)(row[name]) for row in rows] for name in names}
    )
    pa.parquet.write_table(table, "rows.parquet")
    for files in (["0.csv", "1.csv"], ["rows.parquet"]):
        done = predict(run, *files, "--out", "q.parquet", "--json")
        assert done.result["rows"] == 600 and done.err.count("predictions of") == 0
        for name, values in columns("p.parquet").items():
            assert columns("q.parquet")[name].tobytes() == values.tobytes()
    assert predict(run, "rows.parquet", "--out", "q.csv").code == 0
    text = cells_of(pathlib.Path("q.csv"))
    found = np.array([np.float32(row["probability"]) for row in text])
    assert found.tobytes() == columns("p.parquet")["probability"].tobytes()


def test_any_save_is_taken(run: pathlib.Path) -> None:
    evals = [row for row in rows_of(run) if row["kind"] == "eval"]
    best = max(evals, key=lambda row: row["auc"])["step"]
    steps = {}
    for which in ("latest", "best", "6", "12"):
        done = predict(run, "--checkpoint", which, "--out", f"{which}.parquet")
        steps[which] = done.result["step"]
        evaluated = captured("eval", str(run), "--checkpoint", which, "--json")
        assert evaluated.result["step"] == done.result["step"]
    assert steps == {"latest": 12, "best": best, "6": 6, "12": 12}
    assert columns("6.parquet")["logit"].tobytes() != columns("12.parquet")["logit"].tobytes()
    assert predict(run, "--out", "p.parquet").result["step"] == best, "what eval takes"
    toml, folder = run.parent / "run.toml", f"data.dir={run.parent}"
    done = predict(toml, "--run-dir", run, "--out", "q.parquet", *sets(folder, "mesh.devices=1"))
    assert done.result["step"] == 12, "the file does not say keep_best"
    np.testing.assert_allclose(
        columns("q.parquet")["logit"], columns("12.parquet")["logit"], rtol=1e-4, atol=1e-6
    )


def refused(*argv: object) -> str:
    before = sorted(path.name for path in pathlib.Path().iterdir())
    done = predict(*argv)
    assert done.code == 2 and done.out == "" and "Traceback" not in done.err
    assert sorted(path.name for path in pathlib.Path().iterdir()) == before
    return done.err.split("jaxsparse: error: ")[1].removesuffix("\n")


def test_what_cannot_be_written_is_refused(run: pathlib.Path) -> None:
    assert (
        refused(run, "--out", "p.npz")
        == "--out: expected a file ending in .parquet or .csv, got p.npz"
    )
    assert refused(run, "--out", "no/p.csv") == "--out: no is no folder"
    pathlib.Path("f.csv").mkdir()
    assert refused(run, "--out", "f.csv") == "--out: f.csv is a folder"
    long = "p" * 240 + ".csv"  # there is no room for the name it has while it is written
    assert refused(run, "--out", long).startswith(f"--out: {long} cannot be written: ")


def test_nothing_unfinished_is_left_and_no_other_file_is_touched(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = pathlib.Path("p.csv.tmp")
    mine.write_text("mine")
    assert predict(run, "--out", "p.csv").code == 0
    written = pathlib.Path("p.csv").read_bytes()

    def interrupted(*_: Any) -> Iterator[dict[str, Any]]:
        yield {"logit": np.zeros(3, np.float32)}
        os.kill(os.getpid(), signal.SIGTERM)
        yield {"logit": np.zeros(3, np.float32)}

    monkeypatch.setattr("jaxsparse.cli.predict._columns", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    for out in ("p.csv", "p.parquet"):
        done = predict(run, "--out", out)
        assert done.code == 1 and "jaxsparse: failed: ended by SIGTERM" in done.err
    assert signal.getsignal(signal.SIGTERM) is before
    assert mine.read_text() == "mine" and pathlib.Path("p.csv").read_bytes() == written
    assert sorted(path.name for path in pathlib.Path().iterdir()) == ["p.csv", "p.csv.tmp"]


def test_data_are_not_replaced_by_their_predictions(run: pathlib.Path) -> None:
    rows = pathlib.Path("rows.csv")
    rows.write_text("user,item,age\n1,2,0\n")
    text = "is a file of the data, which it would replace"
    pathlib.Path("link").symlink_to(".")
    for files in (["rows.csv"], ["./r*.csv"], [str(rows.absolute())], ["link/rows.csv"]):
        assert refused(run, *files, "--out", "rows.csv") == f"--out: rows.csv {text}"
    train = run.parent / "train.csv"
    before = train.read_bytes()
    for files in (["rows.csv"], []):
        assert refused(run, *files, "--out", train) == f"--out: {train} {text}"
    assert train.read_bytes() == before and rows.read_text() == "user,item,age\n1,2,0\n"
    assert predict(run, "rows.csv", "--out", "other.csv").code == 0
    assert predict(run, "rows.csv", "--out", "other.csv").code == 0, "what it wrote it may replace"


def test_runs_and_saves_that_are_not_there_are_refused(run: pathlib.Path) -> None:
    out = ("--out", "p.csv")
    assert refused("none", *out) == "none: no such run: neither a folder nor a TOML file"
    message = f"--run-dir: is for a TOML, and {run} is a run's folder already"
    assert refused(run, "--run-dir", "a", *out) == message
    pathlib.Path("empty").mkdir()
    message = "empty: is not the folder of a run (config.toml is missing)"
    assert refused("empty", *out) == message
    toml = run.parent / "run.toml"
    message = "runs/clicks: has no checkpoint; did the training come to a save?"
    assert refused(toml, *out) == message
    message = "runs/clicks: has no latest checkpoint"
    assert refused(toml, "--checkpoint", "latest", *out) == message
    message = "--checkpoint: expected latest, best or a step, got 'newest'"
    assert refused(run, "--checkpoint", "newest", *out) == message
    message = f"{run}: no checkpoint at step 7; there are [6, 12]"
    assert refused(run, "--checkpoint", "7", *out) == message


def test_data_that_cannot_be_predicted_are_refused(run: pathlib.Path) -> None:
    out = ("--out", "p.csv")
    message = "predict: give files or --split, not both"
    assert refused(run, "a.csv", "--split", "valid", *out) == message
    assert refused(run, "--split", "test", *out) == "data.test: nothing there to predict"
    assert "none.csv: no such file" in refused(run, "none.csv", *out)
    rows = pathlib.Path("rows.csv")
    rows.write_text("user,item,age\n1,2,0\n1,20,0\n")
    message = refused(run, rows, *out)
    assert "rows.csv" in message and "line 3" in message and "'item'" in message
    assert "in 0..19" in message and "20" in message
    rows.write_text("user,age\n1,2\n")
    assert "there is no feature column 'item'" in refused(run, rows, *out)
    rows.write_text("user,item,age\n")
    assert "rows" in refused(run, rows, *out)


def test_generated_data_are_predicted_but_for_files() -> None:
    assert captured("train", "--run-dir", "a", "--json", *sets(*SMALL)).code == 0
    done = predict("a", "--out", "p.parquet")
    assert done.result["rows"] == 500 and done.result["step"] == 8
    assert predict("a", "--split", "train", "--out", "p.parquet").result["rows"] == 2000
    message = "predict: the run's data are generated, it cannot read files"
    assert refused("a", "x.csv", "--out", "q.csv") == message
    message = "--split: the run has no valid data"
    assert refused("a", "--split", "valid", "--out", "q.csv") == message
    message = "a: has no best checkpoint; train.keep_best saves after evaluations"
    assert refused("a", "--checkpoint", "best", "--out", "q.csv") == message
