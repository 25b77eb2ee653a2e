# SPDX-License-Identifier: Apache-2.0
"""The loop of `Trainer.fit`: steps and epochs, rows of the history, callbacks, pictures."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.testing import assert_trees_equal
from jaxsparse.train.report import Window
from jaxsparse.train.result import PANELS
from tests.train.trainers import BATCHES, changed, trainer_of


@pytest.fixture(scope="module")
def trainer():
    return trainer_of()


class Recorder:
    """Remembers events, and stops at a step."""

    def __init__(self, stop_at=None):
        self.stop_at, self.events = stop_at, []

    def __call__(self, event):
        self.events.append((event.kind, event.step))
        assert int(event.state.step) == event.step
        return event.step == self.stop_at


def test_fit_counts_global_steps_and_goes_round_the_data(trainer):
    result = trainer.fit(BATCHES, steps=4, log_every=2, progress=False)
    assert int(result.state.step) == 4
    assert [row["step"] for row in result.history] == [2, 4]
    result = trainer.fit(BATCHES, steps=5, state=result.state, progress=False)
    assert int(result.state.step) == 5
    state = trainer.init(jax.random.key(0))
    for batch in [*BATCHES, BATCHES[0], BATCHES[0]]:  # the second call starts anew
        state, _ = trainer.step(state, batch)
    assert_trees_equal(result.state, state)
    assert trainer.fit(BATCHES, steps=5, state=state, progress=False).history == []


def test_fit_by_epochs_reads_any_iterable(trainer):
    class Twice:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(BATCHES[:2])

    data = Twice()
    result = trainer.fit(data, epochs=3, seed=7, progress=False)
    assert (data.passes, int(result.state.step)) == (3, 6)
    state = trainer.init(jax.random.key(7))
    for batch in BATCHES[:2] * 3:
        state, _ = trainer.step(state, batch)
    assert_trees_equal(result.state, state)


def test_rows_of_the_history(trainer, tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    for _ in range(2):
        result = trainer.fit(
            BATCHES,
            steps=4,
            log_every=3,
            eval_dataset=BATCHES[:1],
            metrics_path=path,
            progress=False,
        )
    assert [(row["kind"], row["step"]) for row in result.history] == [
        ("train", 3),
        ("eval", 3),
        ("train", 4),
        ("eval", 4),
    ]
    train, evaluated = result.history[:2]
    state, losses = trainer.init(jax.random.key(0)), []
    for batch in BATCHES:
        state, outcome = trainer.step(state, batch)
        losses.append(float(outcome["loss"]))
    assert train["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert {"auc", "logloss", "samples_per_s", "step_ms_p50", "step_ms_p95"} < set(train)
    assert (train["num_samples"], train["skipped_batches"]) == (24, 0)
    assert train["device_bytes"] > sum(s.nbytes for s in state.embeddings.slabs) / 4
    assert 0 < train["step_ms_p50"] <= train["step_ms_p95"] <= train["step_ms_max"]
    assert evaluated | trainer.evaluate(state, BATCHES[:1]) == evaluated
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 8
    assert lines[4:] == result.history


def test_numbers_json_does_not_have_become_null(trainer, tmp_path):
    one_class = changed(BATCHES[0], labels=np.ones(8))
    path = tmp_path / "metrics.jsonl"
    result = trainer.fit([one_class], steps=1, metrics_path=path, progress=False)
    assert math.isnan(result.history[0]["auc"])
    assert json.loads(path.read_text())["auc"] is None


def test_evaluations_by_steps_and_not_twice_at_the_end(trainer):
    seen = Recorder()
    trainer.fit(
        BATCHES,
        steps=4,
        log_every=3,
        eval_every=2,
        eval_dataset=BATCHES[:1],
        callbacks=[seen],
        progress=False,
    )
    assert seen.events == [("eval", 2), ("log", 3), ("log", 4), ("eval", 4)]


def test_a_callback_can_stop_and_all_are_told(trainer):
    stops, told = Recorder(stop_at=2), Recorder()
    result = trainer.fit(BATCHES, steps=9, log_every=1, callbacks=[stops, told], progress=False)
    assert int(result.state.step) == 2
    assert stops.events == told.events == [("log", 1), ("log", 2)]


def test_keep_best_keeps_a_state_and_loses_patience(trainer):
    best = js.KeepBest("loss", mode="min", patience=2)
    values = iter([3.0, 1.0, 2.0, 1.5, 0.5])
    kept = []

    def scripted(event):
        metrics = {**event.metrics, "loss": next(values)}
        kept.append(jax.tree.map(np.array, event.state.params))
        return best(dataclasses.replace(event, metrics=metrics))

    result = trainer.fit(
        BATCHES,
        steps=9,
        log_every=99,
        eval_every=1,
        eval_dataset=BATCHES[:1],
        callbacks=[lambda event: event.kind == "eval" and scripted(event)],
        progress=False,
    )
    assert int(result.state.step) == 4
    assert (best.step, best.value) == (2, 1.0)
    assert_trees_equal(jax.tree.map(np.array, best.state.params), kept[1])
    assert np.isfinite(trainer.evaluate(best.state, BATCHES)["loss"])


def test_keep_best_needs_a_known_metric_and_mode(trainer):
    with pytest.raises(ValueError, match="KeepBest: mode must be 'max' or 'min', got 'up'"):
        js.KeepBest("auc", mode="up")
    with pytest.raises(ValueError, match=r"KeepBest: no metric 'acc' in the evaluation; it has \["):
        trainer.fit(
            BATCHES,
            steps=1,
            eval_dataset=BATCHES[:1],
            callbacks=[js.KeepBest("acc")],
            progress=False,
        )


def test_plot_draws_and_saves_a_picture(trainer, tmp_path):
    result = trainer.fit(BATCHES, steps=2, log_every=1, eval_dataset=BATCHES[:1], progress=False)
    figure = result.plot(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert [axis.get_title() for axis in figure.axes] == [title for _, title in PANELS]
    assert [len(axis.lines) for axis in figure.axes] == [2, 2, 1]
    final = {"step": 2, "split": "test", "loss": 0.5, "auc": 0.7}
    figure = result.plot(final=final, best_auc=0.9)
    assert [len(axis.lines) for axis in figure.axes] == [3, 4, 1]
    labels = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert labels == ["train", "eval", "test", "best reachable"]


def test_a_result_tells_little_of_much(trainer):
    result = trainer.fit(BATCHES, steps=2, log_every=1, eval_dataset=BATCHES[:1], progress=False)
    assert re.fullmatch(
        r"FitResult\(step 2, 3 rows of history, train loss 0\.\d{4}, train auc 0\.\d{4}, "
        r"eval loss 0\.\d{4}, eval auc 0\.\d{4}\)",
        repr(result),
    )
    rows = [{"kind": "train", "samples_per_s_p50": speed} for speed in (1.0, 9.0, 5.0)]
    assert dataclasses.replace(result, history=rows).samples_per_s == 5.0
    empty = dataclasses.replace(result, history=[], interrupted=True)
    assert math.isnan(empty.samples_per_s)
    assert repr(empty) == "FitResult(step 2, 0 rows of history, interrupted)"


def test_the_median_speed_leaves_out_the_step_that_compiled(trainer):
    window = Window()
    window.step_ms, window.samples = [9000.0, 10.0, 10.0], 600
    row = window.row(3, 0, trainer.emb.mesh)
    assert row["samples_per_s_p50"] == pytest.approx(20_000)
    assert row["samples_per_s"] == pytest.approx(600 / 9.02)


def test_progress_goes_to_stderr(trainer, capsys):
    trainer.fit(BATCHES, steps=1, eval_dataset=BATCHES[:1])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "train step       1/1  loss 0." in captured.err
    assert "eval  step       1/1  loss 0." in captured.err
