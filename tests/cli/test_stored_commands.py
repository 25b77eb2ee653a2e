# SPDX-License-Identifier: Apache-2.0
"""Commands on a run with a row store: the shipped example, small."""

from __future__ import annotations

import pathlib

import pytest

from jaxsparse.ckpt import CheckpointManager
from jaxsparse.ckpt.stored import saved_census
from jaxsparse.cli.row_disks import LOCK, PREFIX, _lock
from tests.cli.commands import Done, captured, rows_of, sets

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "dynamic.toml"
SMALL = (
    "data.train_rows=6000",
    "data.test_rows=1000",
    "train.batch_size=250",
    "train.log_every=8",
    "table_defaults.embedding_dim=4",
    "tables.user.keys.capacity=2500",
    "tables.user.tiers.device_rows=200",
    "tables.user.tiers.host_rows=50",
    "tables.item.tiers.device_rows=1000",
    "train.batches_per_pass=2",
    "model.bottom=[4]",
    "model.top=[8]",
    "mesh.devices=1",
)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Done]:
    """A folder with the run ``runs/dynamic``, and what training printed."""
    folder = tmp_path_factory.mktemp("example")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        left = folder / "runs" / "rows-on-ssd" / f"{PREFIX}killed"
        left.mkdir(parents=True)
        (left / "segment").write_bytes(b"rows of a command that was killed")
        done = captured("train", str(EXAMPLE), *sets(*SMALL))
    assert done.code == 0, done.err
    return folder, done


def test_the_example_trains_and_tells_what_passes_cost(
    example: tuple[pathlib.Path, Done],
) -> None:
    folder, done = example
    rows = [row for row in rows_of(folder / "runs" / "dynamic") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [8, 16, 24]
    assert all(row["batches_per_pass"] == 2 for row in rows)
    last = rows[-1]
    assert set(last["tables"]) == {"user", "item"}
    assert last["tables"]["user"]["ssd_rows"] > 0 and 0 < last["garbage"] <= 1
    assert 0 < last["tables"]["user"]["admission_rate"] < 1
    assert sum(row["ssd_read_bytes"] for row in rows) > 0
    assert "  a pass: hits " in done.err and "  garbage " in done.err
    assert not list((folder / "runs" / "rows-on-ssd").iterdir())


def test_eval_and_predict_judge_the_same_rows(
    example: tuple[pathlib.Path, Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, trained = example
    monkeypatch.chdir(folder)
    done = captured("eval", "runs/dynamic")
    for name in ("auc", "logloss", "step"):
        assert done.result[name] == trained.result[name]
    # With all rows in memory it is the same run.
    memory = ["tables.user.tiers={device_rows=700}", "tables.item.tiers.device_rows=2000"]
    assert captured("eval", "runs/dynamic", *sets(*memory)).result["auc"] == done.result["auc"]
    predicted = captured("predict", "runs/dynamic", "--out", "p.csv").result
    assert predicted["rows"] == 1000 and predicted["step"] == 24
    assert not list((folder / "runs" / "rows-on-ssd").iterdir())


def test_inspect_tells_rows_by_tier_with_a_picture(
    example: tuple[pathlib.Path, Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = example
    monkeypatch.chdir(folder)
    done = captured("inspect", "runs/dynamic", "--tiers")
    user = done.result["tables"]["user"]
    manager = CheckpointManager(folder / "runs" / "dynamic" / "checkpoints")
    census = saved_census(manager.path(24), manager.manifest(24))["user"]
    assert (
        user["rows"] == census.keys.size == sum(user[t]["rows"] for t in ("device", "ram", "ssd"))
    )
    assert user["device"]["rows"] == 200 and user["ssd"]["rows"] > 0
    shares = [user[tier]["occurrences"] for tier in ("device", "ram", "ssd")]
    assert sum(shares) == pytest.approx(1) and shares[0] == max(shares)
    device, ssd = (census.hotness[census.tier == number] for number in (0, 2))
    assert user["device"]["p100"] == device.max() > user["ssd"]["p50"]
    assert ssd.size == user["ssd"]["rows"]
    (line,) = [text for text in done.out.splitlines() if text.startswith("user   ssd")]
    assert f"{user['ssd']['rows']:,}" in line
    assert pathlib.Path(done.result["picture"]).read_bytes()[1:4] == b"PNG"


def test_inspect_tiers_of_a_run_without_them_is_refused(
    synthetic: tuple[pathlib.Path, Done],
) -> None:
    done = captured("inspect", str(synthetic[0]), "--tiers")
    assert done.code == 2
    assert "no table has dynamic keys or tiers, all rows are on the devices" in done.err


def test_folders_in_use_and_disks_that_cannot_be_used(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    used = tmp_path / "disk" / f"{PREFIX}used"
    used.mkdir(parents=True)
    held = _lock(used)
    assert held is not None and _lock(used) is None
    (tmp_path / "file").write_text("")
    done = captured("eval", "nowhere")
    assert done.code == 2
    options = sets(*SMALL, "tables.user.tiers.ssd=['disk', 'file']")
    done = captured("train", str(EXAMPLE), *options)
    assert done.code == 2
    assert f"{tmp_path / 'file'}: cannot be used for rows: " in done.err
    assert [path.name for path in (tmp_path / "disk").iterdir()] == [used.name]
    assert (used / LOCK).exists()


def test_the_best_state_of_a_run_is_that_of_a_save(
    files: pathlib.Path, in_an_empty_folder: pathlib.Path
) -> None:
    dynamic = "tables.user.keys={kind='dynamic', capacity=50}"
    # Steps so large that the first evaluation is the best.
    wild = "optimizer={kind='adam', learning_rate=0.1}"
    rest = ("train.keep_best=true", "train.eval_every=3", "mesh.devices=1", wild)
    where = f"data.dir={files.parent}"
    options = sets(dynamic, where, "tables.thing.vocabulary_size=20", *rest)
    done = captured("train", str(files), "--run-dir", "runs/best", *options)
    assert done.code == 0, done.err
    evaluations = [row for row in rows_of(pathlib.Path("runs/best")) if row["kind"] == "eval"]
    best = max(evaluations, key=lambda row: float(row["auc"]))
    assert done.result["step"] == best["step"] < evaluations[-1]["step"]
    assert done.result["auc"] == pytest.approx(best["auc"])


@pytest.mark.slow
def test_check_compares_the_rows_of_a_store_by_key(in_an_empty_folder: pathlib.Path) -> None:
    small = [one for one in SMALL if not one.startswith("mesh")]
    done = captured("check", str(EXAMPLE), "--devices", "2", "--json", *sets(*small))
    assert done.code == 0 and done.result["agree"]
    assert {"tables/user/rows", "tables/user/slot.accumulator"} <= set(done.result["shares"])
