# SPDX-License-Identifier: Apache-2.0
"""`Trainer` with a row store: the same numbers wherever rows lie, and what they cost."""

from __future__ import annotations

import dataclasses
import time

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.store.ram import RamRows
from jaxsparse.testing import assert_trees_equal
from tests.field_cases.layers import mesh_of
from tests.store.checkpoints import SETUPS
from tests.store.stores import dynamic
from tests.train.event_files import read_scalars
from tests.train.trainers import OPTIMIZER, Tanh

STEPS, NUM_KEYS = 24, 60


def dataset(seed=0, steps=STEPS, num_keys=NUM_KEYS):
    rng = np.random.default_rng(seed)
    size = 4 * steps
    user, item = rng.integers(0, num_keys, size), rng.integers(0, 10, size)
    columns = {"user": user * (2**58 + 1), "item": item, "label": (user + item) % 2}
    columns["value"] = rng.normal(size=size)
    return js.data.from_arrays(columns, 4, dense=["value"])


def trainer_of(tiers, devices=1):
    user = dynamic("user", 80, 2, js.Adagrad(0.1), tiers)
    item = js.TableSpec("item", vocabulary_size=10, embedding_dim=2, optimizer=js.Adagrad(0.1))
    features = [js.FeatureSpec("user", user), js.FeatureSpec("item", item)]
    emb = js.EmbeddingCollection(features, mesh=mesh_of(devices))
    return js.Trainer(Tanh(inputs=5), emb, optimizer=OPTIMIZER)


def outcome(trainer, state):
    """All that a run leaves, independent of where rows lie."""
    keys = trainer.store.keys("user")
    tables = state.embeddings
    return {
        "keys": keys,
        "rows": trainer.store.read(tables, "user", keys),
        "slots": trainer.store.read_slots(tables, "user", keys),
        "item": trainer.emb.read(tables, "item", np.arange(10)),
        "params": state.params,
        "opt": state.opt_state,
    }


def fit(setup, devices, folder, **options):
    trainer = trainer_of(SETUPS[setup](folder), devices)
    result = trainer.fit(
        dataset(), steps=STEPS, eval_dataset=dataset(1, 3, 2 * NUM_KEYS), progress=False, **options
    )
    predicted = trainer.predict(result.state, dataset(2, 3, 2 * NUM_KEYS))
    done = outcome(trainer, result.state)
    trainer.store.close()
    return done, result.history, predicted


NUMBERS = ("step", "loss", "auc", "logloss", "num_samples")


@pytest.mark.parametrize(
    ("setup", "devices"),
    [
        ("ssd", 1),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("ram", 1), ("ram", 4), ("ssd", 4))
        ),
    ],
)
def test_fit_gives_the_same_numbers_wherever_rows_lie(setup, devices, tmp_path):
    options = {"eval_every": 7, "log_every": 5}
    want, want_history, want_predicted = fit("device", devices, tmp_path, **options)
    got, history, predicted = fit(setup, devices, tmp_path, **options)
    assert_trees_equal(got, want)
    assert predicted.tobytes() == want_predicted.tobytes()
    assert len(history) == len(want_history)
    for mine, other in zip(history, want_history, strict=True):
        names = [name for name in NUMBERS if name in other]
        assert [mine[name] for name in names] == [other[name] for name in names]
    # All keys are new once, however batches are grouped.
    totals = [sum(row.get("new_keys", 0) for row in h) for h in (history, want_history)]
    assert totals[0] == totals[1] == len(want["keys"])
    last = [row for row in history if row["kind"] == "train"][-1]
    assert last["passes"] >= 1 and 0 <= last["hit_rate"] <= 1
    assert last["host_to_device_bytes"] > 0 and last["ram_written_bytes"] > 0
    assert last["plan_wait_ms"] >= 0 and last["row_wait_ms"] >= 0


def test_a_row_of_the_history_tells_what_passes_did(tmp_path):
    trainer = trainer_of(SETUPS["ssd"](tmp_path))
    result = trainer.fit(
        dataset(),
        steps=STEPS,
        log_every=8,
        batches_per_pass=4,
        progress=False,
        events_folder=tmp_path,
    )
    rows, stats = result.history, trainer.store.stats()["user"]
    assert [row["passes"] for row in rows] == [2, 2, 2]
    told = [row["tables"]["user"] for row in rows]
    size, lookups = stats["size"], 4 * STEPS
    assert told[-1]["size"] == size == sum(row["new_keys"] for row in rows)
    assert sum(one["insert_rate"] for one in told) / 3 == pytest.approx(size / lookups)
    assert sum(one["hit_rate"] for one in told) / 3 == pytest.approx(stats["hit_rate"])
    assert stats["hit_rate"] == stats["hits"] / lookups and stats["admission_rate"] == 1
    assert all(one["eviction_rate"] == 0 for one in told)
    for one in told:
        assert one["device_rows"] <= 16 and one["host_rows"] <= 8
    assert told[-1]["ssd_rows"] > 0 and 0 < rows[-1]["garbage"] < 1
    for row in rows:
        parts = row["device_wait_ms"] + row["ram_wait_ms"] + row["ssd_wait_ms"]
        assert 0 <= parts <= row["row_wait_ms"] and row["data_wait_ms"] <= row["plan_wait_ms"]
    assert sum(row["ssd_read_bytes"] + row["ram_read_bytes"] for row in rows) > 0
    assert read_scalars(tmp_path)["train/tables/user/size"][STEPS] == size
    trainer.store.close()


def test_waits_are_booked_on_the_tier_that_was_slow(monkeypatch):
    trainer = trainer_of(SETUPS["ram"](None))
    plain = RamRows.read_into

    def slow(self, rows, out, places):
        time.sleep(0.02)
        plain(self, rows, out, places)

    monkeypatch.setattr(RamRows, "read_into", slow)
    state = trainer.init(jax.random.key(0))
    facts = []
    tables = state.embeddings
    for p in trainer.store.passes(dataset(), batches_per_pass=2):
        tables = trainer.store.enter(tables, p)
        facts.append(p.facts)
        assert len(list(p)) == 2
    slow_s, all_s = (sum(f[name] for f in facts) for name in ("ram_wait_s", "row_wait_s"))
    assert 0.5 * all_s < slow_s <= all_s and slow_s > 0.02
    assert sum(f["ssd_wait_s"] for f in facts) == 0
    moved = trainer.store.stats()["user"]
    read = sum(f["ram_read_bytes"] for f in facts)
    assert read == moved["ram_read_bytes"] == sum(f["host_to_device_bytes"] for f in facts)
    trainer.store.close()


def test_no_key_behind_the_last_step_is_looked_at():
    outcomes = []
    for setup in ("device", "ram"):
        trainer = trainer_of(SETUPS[setup](None))
        data = dataset()
        first = trainer.fit(data, steps=10, progress=False)
        seen = {int(key) % 2**64 for b in list(dataset())[:10] for key in b.features["user"]}
        assert set(trainer.store.keys("user").tolist()) == seen
        second = trainer.fit(data, steps=STEPS, state=first.state, progress=False)
        outcomes.append(outcome(trainer, second.state))
        trainer.store.close()
    assert_trees_equal(*outcomes)


def test_single_steps_equal_fit():
    whole, _, _ = fit("ram", 1, None)
    trainer = trainer_of(SETUPS["ram"](None))
    state = trainer.init(jax.random.key(0))
    for batch in dataset():
        state, result = trainer.step(state, batch)
        assert bool(result["finite"])
    assert_trees_equal(outcome(trainer, state), whole)
    trainer.store.close()


def test_evaluation_changes_nothing():
    trainer = trainer_of(SETUPS["ram"](None))
    result = trainer.fit(dataset(), steps=STEPS, progress=False)
    before = outcome(trainer, result.state), trainer.store.stats()
    first = trainer.evaluate(result.state, dataset(1, 3, 2 * NUM_KEYS))
    assert trainer.evaluate(result.state, dataset(1, 3, 2 * NUM_KEYS)) == first
    assert_trees_equal(outcome(trainer, result.state), before[0])
    after = trainer.store.stats()
    assert after["user"]["size"] == before[1]["user"]["size"]
    assert after["user"]["lookups"] == before[1]["user"]["lookups"]
    trainer.store.close()


def test_what_a_trainer_without_its_store_refuses():
    trainer = trainer_of(None)
    state = trainer_of(None).init(jax.random.key(0))
    for call in (
        lambda: trainer.step(state, next(iter(dataset()))),
        lambda: trainer.evaluate(state, dataset()),
        lambda: trainer.fit(dataset(), steps=1, state=state, progress=False),
    ):
        with pytest.raises(ValueError, match="this trainer has no RowStore: start from its own"):
            call()
    state = trainer.init(jax.random.key(0))
    with pytest.raises(ValueError, match="fit: KeepBest cannot keep a state whose tables have Dyn"):
        trainer.fit(dataset(), steps=1, state=state, callbacks=[js.KeepBest()], progress=False)
    without_user = dataclasses.replace(next(iter(dataset())), features={"item": np.arange(4)})
    with pytest.raises(ValueError, match=r"missing \['user'\]"):
        trainer.step(state, without_user)
    trainer.store.close()
