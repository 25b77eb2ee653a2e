# SPDX-License-Identifier: Apache-2.0
"""What a row store refuses, before anything is changed, and in which words."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.store import StoreError
from tests.field_cases.layers import mesh_of, table
from tests.store.stores import Stored, batch_of, dynamic

FOUR = js.Tiers(device_rows=4)


def one_table(**options):
    return Stored([js.FeatureSpec("f", dynamic(**options))])


def batches(*keys):
    return [batch_of({"f": np.array(batch)}) for batch in keys]


def test_collections_and_states_that_do_not_belong():
    plain = js.EmbeddingCollection([js.FeatureSpec("f", table())], mesh=mesh_of(1))
    with pytest.raises(ValueError, match="RowStore: no table has Dynamic keys or tiers"):
        js.RowStore(plain, plain.init(jax.random.key(0)))
    with one_table() as trained, one_table(capacity=9) as other:
        with pytest.raises(ValueError, match="the state was made by another collection"):
            js.RowStore(trained.emb, other.state)
        with pytest.raises(ValueError, match="the state was made by another collection"):
            trained.store.read(other.state, "t", [1])
    key = jax.random.key(0, impl="rbg")
    with pytest.raises(ValueError, match=r"needs a key of threefry2x32, .* got rbg"):
        one_table().emb.init(key)


def test_the_collection_leaves_stored_tables_to_the_store():
    with one_table() as trained:
        emb, state = trained.emb, trained.state
        with pytest.raises(ValueError, match=r"pack: the rows of \['t'\] .* make a js.RowStore"):
            emb.pack({"f": np.array([1])})
        for call in (emb.read, emb.read_slots):
            with pytest.raises(
                ValueError, match=r"table 't' has Dynamic keys .* js.RowStore knows"
            ):
                call(state, "t", [1])
        with pytest.raises(ValueError, match=r"table 't' has Dynamic keys .* js.RowStore knows"):
            emb.write(state, "t", [1], np.zeros((1, 2)))


def test_a_full_table_refuses_the_batch_and_keeps_all():
    with one_table(capacity=5) as trained:
        trained.train(batches([1, 2, 3, 4]))
        rows = trained.read([1, 2, 3, 4, 5])
        text = r"table 't' is full: the batch brings 2 new keys, 4 of its 5 rows are in use; raise"
        with pytest.raises(js.StoreFullError, match=text):
            trained.train(batches([4, 5, 6]))
        assert trained.keys() == [1, 2, 3, 4]
        assert trained.read([1, 2, 3, 4, 5]).tobytes() == rows.tobytes()
        # Batches before it are trained.
        with pytest.raises(js.StoreFullError, match="is full"):
            trained.train(batches([1], [5], [6]), batches_per_pass=8)
        assert trained.keys() == [1, 2, 3, 4, 5]
        assert trained.read([1, 5]).tolist() == (rows[[0, 4]] - np.float32(1)).tolist()


def test_a_batch_larger_than_the_devices_share_is_refused_before_it_is_trained():
    with one_table(tiers=FOUR) as trained:
        text = r"table 't': one batch needs 5 rows on the devices, the table has 4; raise Tiers"
        with pytest.raises(js.StoreFullError, match=text):
            trained.train(batches([1, 2, 3, 4, 5]))
        assert trained.keys() == [] and trained.steps == 0
        trained.train(batches([1, 2, 3, 4]))


def test_a_batch_larger_than_the_table_with_eviction():
    with one_table(capacity=3, eviction=js.LRU()) as trained:
        text = r"table 't' is too small for one batch: it needs 4 rows at once, the table has 3"
        with pytest.raises(js.StoreFullError, match=text):
            trained.train(batches([1, 2, 3, 4]))
        assert trained.keys() == []


def test_passes_are_entered_one_after_another():
    with one_table(tiers=FOUR) as trained:
        store, data = trained.store, batches([1], [2], [3])
        with pytest.raises(ValueError, match="batches_per_pass must be a positive int or None"):
            store.passes(data, batches_per_pass=0)
        with pytest.raises(RuntimeError, match="enter: there is no pass"):
            store.enter(trained.state, None)
        passes = store.passes(data, batches_per_pass=1)
        first = next(passes)
        with pytest.raises(RuntimeError, match=r"a pass is iterated after state = store.enter"):
            next(iter(first))
        trained.state = store.enter(trained.state, first)
        with pytest.raises(RuntimeError, match="enter: expected the pass that passes"):
            store.enter(trained.state, first)
        assert len(first) == 1
        for what in (
            lambda: store.passes(data),
            lambda: store.write(trained.state, "t", [1], np.zeros((1, 2))),
        ):
            with pytest.raises(RuntimeError, match="passes are under way; take them to their end"):
                what()
        second = next(passes)
        trained.state = store.enter(trained.state, second)
        with pytest.raises(RuntimeError, match="before the next one is entered"):
            next(iter(first))
        next(passes)
        with pytest.raises(RuntimeError, match="passes: a pass was left out"):
            next(passes)
        # That ended them. What was planned and not entered is given up; keys keep their rows.
        rows = trained.read([1, 2, 3])
        trained.train(batches([3]))
        assert trained.read([1, 2, 3]).tolist() == (rows - np.float32([[0], [0], [1]])).tolist()


def test_a_loop_that_is_left_can_be_begun_anew():
    with one_table(tiers=FOUR) as trained:
        rows = trained.read(np.arange(12))
        passes = trained.store.passes(batches([0, 1], [2, 3], [4, 5], [6, 7]), batches_per_pass=1)
        trained.state = trained.store.enter(trained.state, next(passes))
        passes.close()
        for p in trained.store.passes(batches([8, 9, 10, 11]), train=False):
            trained.state = trained.store.enter(trained.state, p)
            with pytest.raises(RuntimeError, match="evict 't': passes are under way"):
                trained.store.evict("t", [0])
        trained.train(batches([0, 1], [2, 3, 4], [5, 6, 7]))
        assert trained.read(np.arange(8)).tolist() == (rows[:8] - np.float32(1)).tolist()


def test_keys_that_reads_and_writes_refuse():
    lenient = js.TableSpec(
        "u",
        vocabulary_size=9,
        embedding_dim=2,
        keys=js.Identity(out_of_range="ignore"),
        tiers=js.Tiers(device_rows=2),
    )
    features = [js.FeatureSpec("f", dynamic(capacity=4)), js.FeatureSpec("g", lenient)]
    with Stored(features) as trained:
        read, write = trained.read, trained.store.write
        with pytest.raises(ValueError, match=r"no table 'x' in the store; its tables: \['t', 'u'"):
            read([1], "x")
        with pytest.raises(ValueError, match=r"table 't': keys must be \[n\]"):
            read([[1]])
        with pytest.raises(ValueError, match=r"table 'u': keys must be \[n\], each with a row"):
            read([9], "u")
        with pytest.raises(TypeError, match="table 't': keys must be integers, str or bytes"):
            read([1.5])
        with pytest.raises(ValueError, match=r"write 't': rows must be \(2, 2\), got \(1, 2\)"):
            write(trained.state, "t", [1, 2], np.zeros((1, 2)))
        with pytest.raises(ValueError, match="write 't': keys must be distinct"):
            write(trained.state, "t", [1, 1], np.zeros((2, 2)))
        with pytest.raises(js.StoreFullError, match="is full: 5 new keys need 5 rows, it has 4"):
            write(trained.state, "t", np.arange(5), np.zeros((5, 2)))
        assert trained.keys() == []


def test_folders_of_another_run_are_refused_or_emptied(tmp_path):
    tiers = js.Tiers(device_rows=2, host_rows=0, ssd=[tmp_path])
    with one_table(tiers=tiers) as trained:
        trained.train(batches([1, 2], [3, 4]))
        trained.store.flush(trained.state)
    with pytest.raises(StoreError, match=r"table 't': .* holds 2 rows of an earlier run"):
        one_table(tiers=tiers)
    store = js.RowStore(trained.emb, trained.emb.init(jax.random.key(0)), discard_rows=True)
    assert store.stats()["t"]["ssd_rows"] == 0
    store.close()


def test_a_closed_store():
    trained = one_table()
    trained.store.close()
    trained.store.close()
    for call in (
        lambda: trained.store.passes([]),
        lambda: trained.store.keys("t"),
        trained.store.stats,
        lambda: trained.store.flush(trained.state),
    ):
        with pytest.raises(ValueError, match="the RowStore is closed"):
            call()
