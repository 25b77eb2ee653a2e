# SPDX-License-Identifier: Apache-2.0
"""A run taken up with another learning rate in its specs gets that one; else the saved one."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import pytest

import jaxsparse as js
from tests.ckpt import runs


def rate(state: Any) -> float:
    return float(state.embeddings.learning_rates["user"])


def halving(step: Any) -> Any:
    return 0.5 ** (step / 100)


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> js.CheckpointManager:
    trainer = runs.make_trainer(1, plain=True, sparse=js.Adam(0.05))
    state = trainer.init(jax.random.key(0))
    manager = js.CheckpointManager(tmp_path / "run")
    manager.save(trainer.emb, state)
    return manager


@pytest.mark.parametrize(
    ("now", "value", "told"),
    [
        (js.Adam(0.05), 0.05, ()),
        (js.Adam(0.5), 0.5, ("user: 0.05 -> 0.5",)),
        (js.Adam(halving), 1.0, ("user: 0.05 -> schedule",)),
    ],
)
def test_the_spec_decides_where_it_has_changed(
    saved: js.CheckpointManager, now: Any, value: float, told: tuple[str, ...]
) -> None:
    trainer = runs.make_trainer(1, plain=True, sparse=now)
    restored = saved.restore(trainer.emb, trainer.init(jax.random.key(1)))
    assert rate(restored.state) == pytest.approx(value)
    assert restored.changed == told


def test_a_rate_set_while_training_is_kept(tmp_path: pathlib.Path) -> None:
    trainer = runs.make_trainer(1, plain=True, sparse=js.Adam(0.05))
    state = trainer.init(jax.random.key(0))
    embeddings = state.embeddings.with_learning_rate("user", 0.02)
    manager = js.CheckpointManager(tmp_path / "run")
    manager.save(trainer.emb, dataclasses.replace(state, embeddings=embeddings))
    again = manager.restore(trainer.emb, trainer.init(jax.random.key(1)))
    assert rate(again.state) == pytest.approx(0.02) and again.changed == ()


def test_a_branch_says_what_has_changed(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = []
    for rule in (js.Adam(0.05), js.Adam(0.4)):
        trainer = runs.make_trainer(1, plain=True, sparse=rule)
        manager = js.CheckpointManager(tmp_path / "run")
        fitted = trainer.fit(
            runs.train_data(), steps=len(outcomes) + 1, checkpoint=manager, progress=True
        )
        outcomes.append(rate(fitted.state))
    assert outcomes == pytest.approx([0.05, 0.4])
    assert "learning rates that have changed: user: 0.05 -> 0.4" in capsys.readouterr().err
