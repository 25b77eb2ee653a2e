# SPDX-License-Identifier: Apache-2.0
"""Tables with tiers equal the plain table bit by bit, for every rule, placement and addressing."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.store.mover import TIDY_EVERY
from tests.field_cases.layers import mesh_of
from tests.store.stores import Stored, dynamic, train

RULES = {
    "sgd": js.SGD(0.5),
    "adagrad": js.Adagrad(0.5),
    "rowwise": js.RowwiseAdagrad(0.5),
    "adam": js.Adam(0.1, per_row_count=True, weight_decay=0.01, catch_up_decay=True),
    "ftrl": js.Ftrl(0.1, l1=0.01),
}
NUM_ROWS = 120


def batches(steps=24):
    rng = np.random.default_rng(3)
    for _ in range(steps):
        lengths = np.array([2, 0, 1, 1])
        bags = js.Ragged.from_lengths(rng.integers(0, NUM_ROWS, 4), lengths, rng.random(4))
        yield {"one": rng.integers(0, NUM_ROWS, 4), "bag": bags, "plain": np.arange(4)}


def features_of(table):
    plain = js.TableSpec(
        "p", vocabulary_size=4, embedding_dim=table.embedding_dim, optimizer=table.optimizer
    )
    return [
        js.FeatureSpec("one", table),
        js.FeatureSpec("plain", plain),
        js.FeatureSpec("bag", table, combiner="sqrtn"),
    ]


def plain_run(table, devices):
    emb = js.EmbeddingCollection(features_of(table), mesh=mesh_of(devices))
    state = emb.init(jax.random.key(4))
    shape = (4, table.embedding_dim)
    grads = {spec.name: np.ones(shape, np.float32) for spec in emb.features}
    acts = []
    for step, features in enumerate(batches()):
        ids = emb.pack(features)
        act, state = train(emb, state, ids, grads, np.int32(step))
        acts.append({name: np.asarray(a) for name, a in act.items()})
    everything = np.arange(NUM_ROWS)
    return acts, emb.read(state, "t", everything), emb.read_slots(state, "t", everything)


@pytest.mark.parametrize(
    ("rule", "placement", "devices", "keys"),
    [
        pytest.param("sgd", "sharded", 4, js.Identity(), marks=pytest.mark.slow),
        ("adagrad", "replicated", 4, js.Identity()),
        pytest.param("rowwise", "single", 4, js.Hashed(seed=3), marks=pytest.mark.slow),
        ("adam", "sharded", 1, js.Hashed(exact_keys=list(range(20)))),
        pytest.param("ftrl", "auto", 4, js.Identity(out_of_range="ignore"), marks=pytest.mark.slow),
    ],
)
def test_a_tiered_table_equals_the_plain_one(rule, placement, devices, keys):
    table = js.TableSpec(
        "t",
        vocabulary_size=NUM_ROWS,
        embedding_dim=3,
        keys=keys,
        optimizer=RULES[rule],
        placement=placement,
        initializer=js.normal(1.0),
    )
    acts, rows, slots = plain_run(table, devices)
    tiered = dataclasses.replace(table, tiers=js.Tiers(device_rows=16))
    with Stored(features_of(tiered), devices, seed=4) as trained:
        got, _ = trained.train(batches())
        for mine, plain in zip(got, acts, strict=True):
            assert list(mine) == list(plain)
            assert all(mine[name].tobytes() == plain[name].tobytes() for name in plain)
        # Rows that no batch has touched are drawn, and equal those the plain table was made with.
        assert trained.read(np.arange(NUM_ROWS)).tobytes() == rows.tobytes()
        for name, slot in trained.slots(np.arange(NUM_ROWS)).items():
            assert slot.tobytes() == slots[name].tobytes()
        assert trained.store.stats()["t"]["host_rows"] > 40


def test_frozen_tables_have_tiers_too():
    table = js.TableSpec(
        "t",
        vocabulary_size=NUM_ROWS,
        embedding_dim=2,
        trainable=False,
        tiers=js.Tiers(device_rows=8),
    )
    with Stored([js.FeatureSpec("f", table)]) as trained:
        before = trained.read(np.arange(NUM_ROWS))
        acts, _ = trained.train({"f": np.arange(s, s + 4)} for s in (0, 4, 8, 0))
        assert np.concatenate([a["f"] for a in acts]).tobytes() == (
            before[[*range(12), *range(4)]].tobytes()
        )
        assert trained.read(np.arange(NUM_ROWS)).tobytes() == before.tobytes()
        assert trained.slots([0, 99]) == {}


def test_two_tables_of_one_slab_have_rows_and_initializers_of_their_own():
    tables = {
        name: js.TableSpec(
            name,
            embedding_dim=2,
            keys=js.Dynamic(20),
            optimizer=js.SGD(1.0),
            tiers=js.Tiers(device_rows=4),
            initializer=initializer,
        )
        for name, initializer in {
            "a": js.constant(1.0),
            "b": js.uniform(0.1),
            "c": js.constant(3.0),
        }.items()
    }
    features = [js.FeatureSpec(f"f{name}", table) for name, table in tables.items()]
    with Stored(features) as trained:
        assert len(trained.emb.layout.slabs) == 1
        data = [{f"f{name}": np.arange(s, s + 3) for name in tables} for s in (0, 3, 6, 0)]
        acts, _ = trained.train(data)
        assert acts[0]["fa"].tolist() == [[1, 1]] * 3 and acts[0]["fc"].tolist() == [[3, 3]] * 3
        assert acts[3]["fa"].tolist() == [[0, 0]] * 3 and acts[3]["fc"].tolist() == [[2, 2]] * 3
        assert (acts[3]["fb"] == acts[0]["fb"] - np.float32(1)).all()
        assert 0 < np.abs(acts[0]["fb"]).max() <= 0.1
        assert trained.read([0, 3, 99], "a").tolist() == [[-1, -1], [0, 0], [1, 1]]


def test_a_batch_of_any_form_is_translated():
    table = js.TableSpec(
        "t",
        embedding_dim=1,
        keys=js.Dynamic(50),
        optimizer=js.SGD(1.0),
        initializer=js.constant(0.0),
    )
    features = [
        js.FeatureSpec("text", table),
        js.FeatureSpec("padded", table, padding_id=-1, max_length=2, truncate="head"),
    ]
    with Stored(features) as trained:
        padded = np.array([[-1, 5, 6, 7], [8, -1, -1, -1]])
        trained.train([{"text": ["ä", "b"], "padded": padded}])
        # Keys that truncation cuts get no row.
        words = js.fingerprint64(["ä", "b"])
        assert trained.keys() == sorted([5, 6, 8, *map(int, words)])
        assert trained.read(["b", "never"]).tolist() == [[-1.0], [0.0]]


def test_batches_are_checked_when_they_are_planned():
    table = js.TableSpec("t", vocabulary_size=9, embedding_dim=1, tiers=js.Tiers(device_rows=4))
    with Stored([js.FeatureSpec("f", table)]) as trained:
        with pytest.raises(ValueError, match=r"feature 'f': key 9 at position 1 is outside 0..8"):
            trained.train([{"f": np.array([1, 9])}])
        with pytest.raises(ValueError, match=r"missing \['f'\], unknown \['g'\]"):
            trained.train([{"g": np.array([1, 2])}])
        assert trained.keys() == []


def test_garbage_on_disks_is_rewritten_however_few_passes_a_run_has(tmp_path):
    tiers = js.Tiers(device_rows=8, host_rows=0, ssd=[tmp_path])
    with Stored([js.FeatureSpec("f", dynamic("t", 24, tiers=tiers))]) as trained:
        for number in range(TIDY_EVERY + 1):
            # One pass, as those of `Trainer.step`; a flush makes a segment of what left.
            trained.train([{"f": np.arange(8) + 8 * (number % 3)}])
            trained.store.flush(trained.state)
        disks = trained.store.stats()["t"]["ssd"]
        assert disks["compactions"] == 1
        assert disks["garbage_rows"] <= disks["live_rows"] == 16
