# SPDX-License-Identifier: Apache-2.0
"""What 1, 4, 8 devices or two processes save, each of them takes up."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.ckpt import CheckpointError
from jaxsparse.testing import assert_trees_equal
from jaxsparse.train.report import Window
from jaxsparse.train.run_state import my_position, restore_window
from tests import job
from tests.ckpt import runs


def fit(trainer: Any, folder: pathlib.Path, steps: int, **options: Any) -> Any:
    manager = js.CheckpointManager(folder, every=3)
    data = runs.train_data()
    return trainer.fit(
        data, steps=steps, log_every=3, checkpoint=manager, progress=False, **options
    )


def assert_same_rows(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in got] == [row["step"] for row in want]
    for name in ("loss", "auc", "logloss", "num_samples", "skipped_batches"):
        assert [r[name] for r in got] == pytest.approx([r[name] for r in want], rel=1e-6), name


@pytest.mark.slow
def test_saves_of_1_4_8_devices_and_two_processes_go_on_everywhere(tmp_path: pathlib.Path) -> None:
    trainer = runs.make_trainer(4, plain=True)
    whole = fit(trainer, tmp_path / "whole", 10)
    fit(trainer, tmp_path / "one", 6)
    others = {devices: runs.make_trainer(devices, plain=True) for devices in (1, 8)}
    for devices, other in others.items():
        fit(other, tmp_path / f"saved-{devices}", 6)
    out = tmp_path / "out"
    out.mkdir()
    environment = {
        **os.environ,
        "JAXSPARSE_TEST_FOLDER": str(tmp_path),
        "JAXSPARSE_TEST_IN_THE_WAY": "two/000000009.tmp",
    }
    root = pathlib.Path(__file__).parents[2]
    program = str(root / "tests" / "job.py")
    done = job.run([program, str(out), "saves"], 2, 2, cwd=root, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    told = job.load(out, ["saves"], 2)["saves"]
    for resumed, half, refused, failed, _ in told:
        history, rows, _ = resumed
        assert_same_rows(history, whole.history)
        want = trainer.emb.read(whole.state.embeddings, "user", np.arange(runs.USERS))
        np.testing.assert_allclose(rows, want, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(half[1], told[0][1][1])
        assert "holds saves up to step 6, and this run starts at step 0" in refused
        assert "SaveError: " in failed and "000000009: cannot be saved: " in failed
    batch = next(iter(runs.train_data()))
    for name in ("saved-1", "one", "saved-8", "two"):
        here = [
            runs.loaded(loader, tmp_path / name, batch) for loader in (trainer, *others.values())
        ]
        held, loss = here[0]
        assert loss == pytest.approx(0.69, abs=0.2)
        for rows, next_loss in [*here[1:], *(loaded[name] for *_, loaded in told)]:
            assert_trees_equal(rows, held)
            assert next_loss == pytest.approx(loss, rel=1e-6)
    np.testing.assert_array_equal(held["user"], told[0][1][1])
    parts = js.CheckpointManager(tmp_path / "two").manifest(6)["parts"]
    assert len(parts["tables/user/rows"]) == 2, "each process writes the rows it has"
    assert_same_rows(fit(trainer, tmp_path / "two", 10).history, whole.history)


def test_positions_and_windows_of_other_process_counts() -> None:
    mesh = js.make_mesh(devices=jax.devices()[:1])
    here = {"state": {"offset": 3}, "taken": 3, "ended": False}
    there = {"state": {"offset": 4}, "taken": 4, "ended": False}
    assert my_position([there], mesh) is there
    assert my_position([here, dict(here)], mesh) == here
    message = (
        "the run was saved by 2 processes with a dataset of its own in each, and 1 cannot go on "
        "where they were; resume it with 2, or train on a dataset whose batches are those of the"
    )
    with pytest.raises(CheckpointError, match=message):
        my_position([here, there], mesh)
    parts = []
    for label in (0.0, 1.0):
        part = Window()
        part.add(0.5, np.zeros(4), np.full(4, label), np.ones(4))
        part.samples, part.step_ms = 4, [1.0, 2.0]
        parts.append(part.state())
    window = Window()
    restore_window(window, parts, mesh)
    row = window.row(7, 0, mesh)
    assert (row["num_samples"], row["auc"], row["step_ms_max"]) == (8, 0.5, 2.0)
    window.clear()
    assert window.samples == 0 and window.step_ms == [1.0, 2.0]
