# SPDX-License-Identifier: Apache-2.0
"""`Trainer.fit` with a `CheckpointManager`: a run stopped anywhere ends as if it had not been."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.ckpt import CheckpointError
from jaxsparse.train.report import Reporter
from jaxsparse.train.trainer import _tell_of as tell_of
from tests.ckpt import runs

EPOCH = -(-runs.ROWS // runs.BATCH)


@pytest.fixture(scope="module")
def trainer() -> Any:
    return runs.make_trainer(2)


class Stop:
    """A callback-like dataset wrapper that does something when a batch is asked for."""

    def __init__(self, data: Any, at: int, act: Callable[[], None]) -> None:
        self.data, self.at, self.act = data, at, act
        self.state, self.restore = data.state, data.restore
        self.seen = 0

    def __iter__(self) -> Iterator[js.Batch]:
        for batch in self.data:
            self.seen += 1
            if self.seen == self.at:
                self.act()
            yield batch


def fit(trainer: Any, folder: pathlib.Path, data: Any = None, **options: Any) -> Any:
    manager = js.CheckpointManager(folder / "ckpt", **options.pop("manager", {"every": 4}))
    defaults = {"steps": 3 * EPOCH + 2, "log_every": 5, "eval_dataset": runs.eval_data()}
    return trainer.fit(
        runs.train_data() if data is None else data,
        checkpoint=manager,
        metrics_path=folder / "metrics.jsonl",
        progress=False,
        **{**defaults, **options},
    )


def assert_same_run(trainer: Any, got: Any, want: Any) -> None:
    runs.assert_same(runs.leaves(trainer, got.state), runs.leaves(trainer, want.state))
    assert runs.without_times(got.history) == runs.without_times(want.history)


class Killed(Exception):
    pass


def die() -> None:
    raise Killed


@pytest.mark.parametrize(
    ("options", "background"),
    [
        ({"eval_every": 7}, False),
        pytest.param({"steps": None, "epochs": 3}, True, marks=pytest.mark.slow),
        pytest.param({}, False, marks=pytest.mark.slow),
        pytest.param({}, True, marks=pytest.mark.slow),
        pytest.param({"eval_every": 7}, True, marks=pytest.mark.slow),
        pytest.param({"steps": None, "epochs": 3}, False, marks=pytest.mark.slow),
    ],
)
def test_killed_anywhere_and_resumed(
    tmp_path: pathlib.Path, trainer: Any, options: dict[str, Any], background: bool
) -> None:
    manager = {"every": 4, "keep": 2, "best": "auc", "background": background}
    want = fit(trainer, tmp_path / "whole", manager=manager, **options)
    part = tmp_path / "part"
    for at in (2, 9, EPOCH, 5, 1):
        data = Stop(runs.train_data(), at, die)
        with pytest.raises(Killed):
            fit(trainer, part, data, manager=manager, **options)
    got = fit(trainer, part, manager=manager, **options)
    assert_same_run(trainer, got, want)
    files = [runs.rows_of(folder / "metrics.jsonl") for folder in (tmp_path / "whole", part)]
    assert runs.without_times(files[1]) == runs.without_times(files[0])
    saves = [js.CheckpointManager(f / "ckpt").steps() for f in (tmp_path / "whole", part)]
    assert saves[0] == saves[1]


@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "at", [6, *(pytest.param(at, marks=pytest.mark.slow) for at in (EPOCH, EPOCH + 1))]
)
def test_sigterm_saves_and_returns(
    tmp_path: pathlib.Path, trainer: Any, at: int, prefetch: int
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    want = fit(trainer, tmp_path / "whole")
    data = Stop(runs.train_data(), at, lambda: os.kill(os.getpid(), signal.SIGTERM))
    stopped = fit(trainer, tmp_path / "part", data, prefetch=prefetch)
    assert stopped.interrupted and not want.interrupted
    step = int(stopped.state.step)
    if prefetch:
        assert at - prefetch - 3 <= step <= at, "the signal came with a batch drawn ahead"
    else:
        # Before a save the next batch is fetched: a signal that comes with it ends the run there.
        assert step == (at - 1 if (at - 1) % 4 == 0 else at)
    assert js.CheckpointManager(tmp_path / "part" / "ckpt").latest() == step
    assert signal.getsignal(signal.SIGTERM) is before
    assert_same_run(trainer, fit(trainer, tmp_path / "part"), want)


def test_a_finished_run_makes_no_step_and_more_steps_go_on(
    tmp_path: pathlib.Path, trainer: Any
) -> None:
    first = fit(trainer, tmp_path, steps=10)
    again = fit(trainer, tmp_path, steps=10, resume="must")
    assert_same_run(trainer, again, first)
    more = fit(trainer, tmp_path, steps=20, resume="must")
    alone = fit(trainer, tmp_path / "alone", steps=20, eval_every=10)
    runs.assert_same(runs.leaves(trainer, more.state), runs.leaves(trainer, alone.state))


def test_rows_that_a_killed_run_wrote_are_cut_off(tmp_path: pathlib.Path, trainer: Any) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3}\n{"ste')
    fit(trainer, tmp_path, steps=10)
    whole = path.read_text()
    assert '{"step": 3}' not in whole
    path.write_text(whole + '{"kind": "train", "step": 15}\n{"ki')
    fit(trainer, tmp_path, steps=10)
    assert path.read_text() == whole
    path.write_text(whole[:50])
    fit(trainer, tmp_path, steps=10)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        json.loads(line) for line in whole.splitlines()
    ]


def test_callbacks_go_on_too(tmp_path: pathlib.Path, trainer: Any) -> None:
    def best() -> Any:
        # The loss falls: every evaluation after the first is worse.
        return js.KeepBest("loss", mode="max", patience=2)

    want, got = best(), best()
    whole = fit(trainer, tmp_path / "whole", callbacks=[want], eval_every=4, steps=40)
    assert int(whole.state.step) < 40, "stopped early"
    data = Stop(runs.train_data(), 7, die)
    with pytest.raises(Killed):
        fit(trainer, tmp_path / "part", data, callbacks=[best()], eval_every=4, steps=40)
    part = fit(trainer, tmp_path / "part", callbacks=[got], eval_every=4, steps=40)
    assert_same_run(trainer, part, whole)
    assert (got.step, got.value) == (want.step, want.value)
    runs.assert_same(runs.leaves(trainer, got.state), runs.leaves(trainer, want.state))
    again = best()
    stopped = fit(trainer, tmp_path / "part", callbacks=[again], eval_every=4, steps=40)
    assert_same_run(trainer, stopped, whole)
    message = (
        r"the run was saved with the callbacks \['KeepBest'\] and is resumed with \[\]; pass the "
        r"same ones in the same order"
    )
    with pytest.raises(CheckpointError, match=message):
        fit(trainer, tmp_path / "part", steps=40)


def test_a_dataset_without_a_position_is_skipped_to_it(
    tmp_path: pathlib.Path, trainer: Any
) -> None:
    batches = list(runs.train_data())
    want = fit(trainer, tmp_path / "whole", batches)
    for steps in (5, EPOCH, EPOCH + 3, 3 * EPOCH + 2):
        got = fit(trainer, tmp_path / "part", batches, steps=steps, eval_dataset=None)
    runs.assert_same(runs.leaves(trainer, got.state), runs.leaves(trainer, want.state))


@pytest.mark.slow
def test_bad_batches_are_skipped_once(tmp_path: pathlib.Path) -> None:
    trainer = runs.make_trainer(2)
    trainer.on_bad_sample = "skip"
    batches = list(runs.train_data())
    for bad in (3, 4, 9):
        spoilt = np.full_like(batches[bad].dense, np.nan)
        batches[bad] = dataclasses.replace(batches[bad], dense=spoilt)
    want = fit(trainer, tmp_path / "whole", batches, steps=14)
    for steps in (3, 6, 14):
        got = fit(trainer, tmp_path / "part", batches, steps=steps)
    runs.assert_same(runs.leaves(trainer, got.state), runs.leaves(trainer, want.state))


def test_what_cannot_be_resumed_is_told(tmp_path: pathlib.Path, trainer: Any) -> None:
    data = runs.train_data()
    with pytest.raises(ValueError, match="fit: resume must be 'auto', 'never' or 'must', got 'x'"):
        fit(trainer, tmp_path, resume="x")
    with pytest.raises(ValueError, match=r"fit: resume='must' needs checkpoint=CheckpointManager"):
        trainer.fit(data, steps=1, resume="must", progress=False)
    message = f"{tmp_path / 'ckpt'}: no checkpoint to resume from (resume='must')"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        fit(trainer, tmp_path, resume="must")
    done = fit(trainer, tmp_path, steps=6)
    ahead = jax.tree.map(lambda leaf: leaf.copy(), done.state)
    ahead, _ = trainer.step(ahead, next(iter(data)))
    message = (
        "the latest save is at step 6, before step 7 of the state that was given: pass "
        "resume='never' to go on from the state, or no state"
    )
    with pytest.raises(CheckpointError, match=re.escape(message)):
        fit(trainer, tmp_path, state=ahead, steps=9)
    message = (
        r"the dataset cannot go on where the run was saved: .*seed=5, but this dataset has "
        r"seed=6.*; resume it with the same data and batch size"
    )
    with pytest.raises(CheckpointError, match=message):
        fit(trainer, tmp_path, runs.train_data(seed=6), steps=9)
    message = (
        r"saved with a dataset that knows its position, and this one has no restore\(state\); "
        "resume it with the same one"
    )
    with pytest.raises(CheckpointError, match=message):
        fit(trainer, tmp_path, list(data), steps=9)
    assert int(fit(trainer, tmp_path, state=ahead, steps=9, resume="never").state.step) == 9


def test_processes_have_to_see_one_folder(
    tmp_path: pathlib.Path, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxsparse.train.run_state.gather", lambda _, latest: [latest, 40])
    message = r"ckpt: the processes see saves up to the steps \[None, 40\]; they need one folder"
    with pytest.raises(CheckpointError, match=message):
        fit(trainer, tmp_path, steps=1)


def test_new_parts_are_told(
    tmp_path: pathlib.Path, trainer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(trainer, tmp_path, steps=2)
    state = trainer.init(jax.random.key(0))
    more = dataclasses.replace(state, model_state=(*state.model_state, jax.numpy.ones(2)))
    manager = js.CheckpointManager(tmp_path / "ckpt", allow_new=True)
    restored = manager.restore(trainer.emb, more)
    assert restored.new == ("dense/model_state.2",)
    with Reporter(None, None, progress=True) as reporter:
        tell_of(reporter, restored)
    told = "not in the checkpoint, left at initial values: dense/model_state.2"
    assert told in capsys.readouterr().err


def test_people_are_told(
    tmp_path: pathlib.Path, trainer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in (2, 4):
        manager = js.CheckpointManager(tmp_path, every=100)
        trainer.fit(runs.train_data(), steps=steps, checkpoint=manager)
    err = capsys.readouterr().err
    assert err.count("resumed at step 2") == 1 and "left at initial values" not in err


@pytest.mark.slow
def test_a_run_that_has_made_its_epochs_ends_at_once(tmp_path: pathlib.Path) -> None:
    trainer = runs.make_trainer(1)
    steps = []
    for epochs in (2, 1):
        manager = js.CheckpointManager(tmp_path)
        result = trainer.fit(runs.train_data(), epochs=epochs, checkpoint=manager, progress=False)
        steps.append(int(result.state.step))
    assert steps[0] == steps[1]
