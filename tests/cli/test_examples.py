# SPDX-License-Identifier: Apache-2.0
"""The shipped examples reach what they promise, with the commands of the README."""

from __future__ import annotations

import json
import os
import pathlib
import time

import numpy as np
import pytest

from jaxsparse.cli import main
from jaxsparse.cli.run_config import SYNTHETIC
from jaxsparse.data import SyntheticConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FRAPPE = pathlib.Path(os.environ.get("JAXSPARSE_FRAPPE", ROOT / "data" / "frappe"))


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_built_in_example_is_the_one_in_examples() -> None:
    assert (EXAMPLES / "synthetic.toml").read_bytes() == SYNTHETIC.read_bytes()


@pytest.mark.parametrize("name", ["synthetic", "frappe", "criteo", "clicks", "dynamic"])
def test_every_example_can_be_planned(name: str) -> None:
    assert main(["plan", str(EXAMPLES / f"{name}.toml")]) == 0


def test_frappe_without_its_data_names_the_missing_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["train", str(EXAMPLES / "frappe.toml"), "--set", "data.dir=nowhere"]
    assert main(command) == 2
    missing = pathlib.Path.cwd() / "nowhere" / "train.csv.gz"
    assert capsys.readouterr().err == f"jaxsparse: error: {missing}: no such file (data.train)\n"


def train_synthetic(capsys: pytest.CaptureFixture[str], *assignments: str) -> dict[str, float]:
    command = ["train", str(EXAMPLES / "synthetic.toml"), "--json", "--set", "mesh.devices=1"]
    assert main([*command, *assignments]) == 0
    result: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["best_auc"] >= 0.78
    return result


@pytest.mark.slow
def test_criteo_runs_on_its_format(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(96):
        integers = ["" if v < 0 else str(v) for v in rng.integers(-1, 50, 13)]
        hexadecimals = [f"{v:08x}" if v else "" for v in rng.integers(0, 20, 26)]
        lines.append("\t".join([str(rng.integers(0, 2)), *integers, *hexadecimals]))
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    small = ["table_defaults.vocabulary_size=100", "train.batch_size=32", "mesh.devices=1"]
    files = [f"data.dir={tmp_path}", "data.train=train.txt", "data.valid=[]", "data.test=test.txt"]
    command = ["train", str(EXAMPLES / "criteo.toml"), "--set", *small, *files]
    assert main([*command, "train.keep_best=false"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["step"] == 3 and result["num_samples"] == 96
    assert result["loss"] < 2


@pytest.mark.slow
def test_synthetic_comes_within_a_hundredth_of_the_best_auc_in_90_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    start = time.perf_counter()
    result = train_synthetic(capsys)
    assert time.perf_counter() - start <= 90
    assert result["best_auc"] - 0.01 <= result["auc"] < result["best_auc"]


@pytest.mark.slow
def test_synthetic_with_dense_features_only_stays_far_below(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nothing = ["table_defaults.trainable=false", "table_defaults.initializer.kind=constant"]
    result = train_synthetic(capsys, *nothing)
    assert 0.5 < result["auc"] <= result["best_auc"] - 0.08


@pytest.mark.slow
def test_synthetic_with_tables_hashed_to_a_hundredth_of_their_rows_stays_below(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tables = [
        f"tables.{field.name}.vocabulary_size={max(1, field.vocabulary_size // 100)}"
        for field in SyntheticConfig().fields
    ]
    result = train_synthetic(capsys, "table_defaults.keys.kind=hashed", *tables)
    assert 0.5 < result["auc"] <= result["best_auc"] - 0.03


@pytest.mark.slow
@pytest.mark.frappe
@pytest.mark.skipif(
    not (FRAPPE / "train.csv.gz").exists(),
    reason="the Frappe files are not there; JAXSPARSE_FRAPPE names their folder",
)
def test_frappe_reaches_its_auc_in_three_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.perf_counter()
    options = ["--set", f"data.dir={FRAPPE}", "mesh.devices=1"]
    assert main(["train", str(EXAMPLES / "frappe.toml"), *options]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["split"] == "test" and result["auc"] >= 0.975
    assert time.perf_counter() - start < 180
