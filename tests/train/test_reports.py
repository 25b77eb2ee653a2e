# SPDX-License-Identifier: Apache-2.0
"""What a run tells of itself: TensorBoard events, traces, the line of progress."""

from __future__ import annotations

import math
import pathlib
import re

import jax
import pytest

import jaxsparse as js
from jaxsparse.train.report import Reporter
from tests.train.event_files import read_scalars


def row(step: int, loss: float, kind: str = "train") -> dict[str, object]:
    return {"kind": kind, "step": step, "loss": loss, "num_samples": 5}


def test_a_resumed_run_goes_on_in_its_events(tmp_path: pathlib.Path) -> None:
    with Reporter(None, None, False, {}, tmp_path) as reporter:
        for step in (2, 4, 6):
            reporter.add(row(step, step / 8))
        reporter.add(row(6, math.nan, "eval"))
    assert read_scalars(tmp_path) == {
        "train/loss": {2: 0.25, 4: 0.5, 6: 0.75},
        "train/num_samples": {2: 5, 4: 5, 6: 5},
        "eval/num_samples": {6: 5},
    }, "nan is no number"
    # Saved after step 4: what came later is told anew.
    resumed = {"history": [row(2, 0.25), row(4, 0.5)], "metrics_bytes": None}
    first = next(tmp_path.iterdir())
    first.rename(tmp_path / "events.out.tfevents.0.earlier")
    with Reporter(None, None, False, resumed, tmp_path) as reporter:
        reporter.add(row(5, 4.0))
    assert read_scalars(tmp_path) == {
        "train/loss": {2: 0.25, 4: 0.5, 5: 4.0},
        "train/num_samples": {2: 5, 4: 5, 5: 5},
        "eval/num_samples": {},
    }


def test_steps_to_profile_are_checked(tmp_path: pathlib.Path) -> None:
    for start, stop in ((3, 3), (-1, 2), (4, 2)):
        message = f"ProfileSteps: expected 0 <= start < stop, got {start} and {stop}"
        with pytest.raises(ValueError, match=re.escape(message)):
            js.ProfileSteps(start, stop, tmp_path)


def test_a_trace_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    trace = js.ProfileSteps(2, 5, "folder")
    for step in (0, 1):
        trace.at(step)
    assert calls == []
    for step in (2, 3):
        trace.at(step)
    assert calls == ["start"]
    trace.close()
    trace.close()
    assert calls == ["start", "stop"]
    assert trace.told.startswith("profile of steps 2 to 3 in folder: open")
    whole = js.ProfileSteps(2, 5, "folder")
    for step in range(8):
        whole.at(step)
    assert calls == ["start", "stop"] * 2
    assert whole.told.startswith("profile of steps 2 to 5 in folder: open")
