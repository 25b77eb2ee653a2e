# SPDX-License-Identifier: Apache-2.0
"""Runs with a row store that are saved, stopped and taken up end as if they had not been."""

from __future__ import annotations

import pytest

import jaxsparse as js
from jaxsparse.testing import assert_trees_equal
from tests.ckpt.runs import without_times
from tests.store.checkpoints import SETUPS
from tests.train.test_stored import NUM_KEYS, STEPS, dataset, outcome, trainer_of

OPTIONS = {"steps": STEPS, "log_every": 5, "progress": False}
BY_TIER = {f"{name}_bytes" for name in ("ram_read", "ram_written", "ssd_read", "ssd_written")}
BY_TIER |= {"garbage", "host_rows", "ssd_rows"}
"""Rows lie in other tiers behind a restore."""


def run(setup, folder, name, devices=1, data=None, **options):
    """All that a run leaves; its rows without times."""
    trainer = trainer_of(SETUPS[setup](folder / f"{name}-ssd"), devices)
    options = {"eval_dataset": dataset(1, 3, 2 * NUM_KEYS), **OPTIONS, **options}
    result = trainer.fit(dataset() if data is None else data, **options)
    done = outcome(trainer, result.state)
    trainer.store.close()
    return done, told(result.history), result


def told(history):
    """Rows as text, without times and what depends on tiers."""
    kept = [_without_tiers(row) for row in history]
    return without_times([{n: v for n, v in r.items() if not n.endswith("_wait_ms")} for r in kept])


def _without_tiers(row):
    kept = {n: v for n, v in row.items() if n not in BY_TIER}
    if "tables" in row:
        kept["tables"] = {name: _without_tiers(one) for name, one in row["tables"].items()}
    return kept


def manager(folder, name, **options):
    return js.CheckpointManager(folder / name, **{"every": 7, **options})


@pytest.mark.parametrize(
    ("first", "second", "devices"),
    [
        ("ssd", "ssd", 1),
        pytest.param("ram", "device", 1, marks=pytest.mark.slow),
        pytest.param("device", "ssd", 4, marks=pytest.mark.slow),
    ],
)
def test_a_run_in_two_parts_is_the_run(first, second, devices, tmp_path):
    want, _, _ = run(first, tmp_path, "whole", devices, checkpoint=manager(tmp_path, "a"))
    # Ends inside a pass of the data, at no multiple of anything.
    saves = manager(tmp_path, "b")
    run(first, tmp_path, "part", devices, checkpoint=saves, steps=11)
    assert saves.steps() == [7, 11]
    got, _, _ = run(second, tmp_path, "part", devices, checkpoint=manager(tmp_path, "b"))
    assert_trees_equal(got, want)


class Asking:
    """A dataset that asks the run to stop when batch ``at`` is drawn, ahead of its turn."""

    def __init__(self, trainer, at):
        self.trainer, self.at, self.data, self.count = trainer, at, dataset(steps=10), 0
        self.batch_size, self.state, self.restore = 4, self.data.state, self.data.restore

    def __iter__(self):
        for batch in self.data:
            self.count += 1
            if self.count == self.at:
                self.trainer.request_stop()
            yield batch


# In the last case all data are drawn when the run stops, and some of them not trained.
@pytest.mark.parametrize(
    ("at", "eval_every"),
    [(9, 8), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 8), (15, 8), (1, None)))],
)
def test_a_run_that_was_asked_to_stop_goes_on_as_if_it_had_not_been(at, eval_every, tmp_path):
    options = {**OPTIONS, "steps": 37}  # almost four times the data
    options |= {"eval_dataset": dataset(1, 3, 2 * NUM_KEYS), "eval_every": eval_every}
    results = []
    for name, stops in (("whole", []), ("parts", [at, at])):
        saves = manager(tmp_path, name, every=13, best="auc")
        for stop in [*stops, 10**6]:
            trainer = trainer_of(SETUPS["ssd"](tmp_path / f"{name}-ssd"))
            result = trainer.fit(Asking(trainer, stop), checkpoint=saves, **options)
            results.append((outcome(trainer, result.state), told(result.history), result))
            trainer.store.close()
        assert result.state.step == 37
    (want, rows, _), *parts = results
    assert [part[2].interrupted for part in parts] == [True, True, False]
    assert_trees_equal(parts[-1][0], want)
    assert parts[-1][1] == rows
    stopped = [int(part[2].state.step) for part in parts]
    assert stopped == sorted(stopped) and stopped[0] >= 1


def test_a_callback_ends_a_run_at_its_step(tmp_path):
    results = []
    for setup in ("ram", "device"):
        saves = manager(tmp_path, setup)
        got, _, result = run(
            setup, tmp_path, setup, callbacks=[lambda event: event.step == 10], checkpoint=saves
        )
        assert int(result.state.step) == 10 and saves.steps() == [7, 10]
        results.append(got)
    assert_trees_equal(*results)
    # No key of a batch behind it was looked at.
    seen = {int(k) % 2**64 for batch in list(dataset())[:10] for k in batch.features["user"]}
    assert set(results[0]["keys"].tolist()) == seen
