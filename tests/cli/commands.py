# SPDX-License-Identifier: Apache-2.0
"""Commands run in this process, and small runs and data for them."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from jaxsparse.cli import main

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
    folder.mkdir(exist_ok=True)
    write_csv(folder / "train.csv", 600, 0)
    write_csv(folder / "valid.csv.gz", 200, 1)
    path = folder / "run.toml"
    path.write_text(FILES)
    return path


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


def run_synthetic(folder: pathlib.Path) -> Done:
    """A short run on synthetic data, into the folder."""
    return captured("train", "--run-dir", str(folder), *sets(*SMALL))


def rows_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
