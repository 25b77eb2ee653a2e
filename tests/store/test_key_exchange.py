# SPDX-License-Identifier: Apache-2.0
"""What is told of batches, and places of several owners; the pure parts, in one process."""

from __future__ import annotations

import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.store.errors import StoreFullError
from jaxsparse.store.hotness import Hotness
from jaxsparse.store.key_exchange import KeyExchange, Told, join, own_batch
from jaxsparse.store.owners import RowOwners, owner_of
from jaxsparse.store.residency import Residency
from jaxsparse.store.translate import keyed_batch
from tests.field_cases.layers import mesh_of
from tests.store.stores import batch_of, dynamic


@pytest.fixture(scope="module")
def emb():
    table = dynamic("t", 40)
    features = [js.FeatureSpec("a", table), js.FeatureSpec("b", table)]
    return js.EmbeddingCollection(features, mesh=mesh_of(1))


def own(emb, a, b):
    keys = batch_of({"a": np.array(a, np.int64), "b": np.array(b, np.int64)})
    # The clock of a batch without samples is not asked.
    return own_batch(keyed_batch(emb, lambda batch: 6 / batch.num_samples, keys))


def told_of(batch):
    return Told(batch.keyed.num_samples, batch.keyed.time, batch.tables)


def test_joined_batches_have_the_distinct_keys_of_each_process(emb):
    mine, other = own(emb, [7, 3], [7, 5]), own(emb, [9, 7, 7], [7, 7, 7])
    told = [told_of(other), None, told_of(mine)]
    joined = join(told, mine, 2)
    assert joined.keys["t"].tolist() == [7, 9, 3, 5, 7]
    assert joined.times_seen["t"].tolist() == [5, 1, 1, 1, 2]
    assert joined.time == 3.0, "the latest"
    codes = {"t": np.array([70, 90, 30, 50, 71])}
    assert joined.own_codes(codes)["t"].tolist() == [71, 30, 71, 50]
    assert join(told, None, 1).own is None


def test_batches_before_an_error_come_before_it(emb):
    def batches():
        yield own(emb, [1], [2])
        yield own(emb, [], [])
        yield own(emb, [3], [4])
        raise ValueError("the file ends")

    keys = KeyExchange(emb.mesh, batches())
    assert not keys.exchange(1, None, False)
    assert len(keys) == 1
    assert keys.exchange(9, None, True), "some process is to end"
    # Nobody has samples in the second batch.
    assert [batch.keys["t"].tolist() for batch in (next(keys), next(keys))] == [[1, 2], [3, 4]]
    with pytest.raises(ValueError, match="the file ends"):
        next(keys)
    keys.exchange(9, None, False)
    assert list(keys) == []
    with pytest.raises(OSError, match="gone"):
        keys.exchange(0, OSError("gone"), False)


def test_rows_lie_at_places_of_their_owner():
    process_at = np.array([0, 0, 0, 3, 3, 3], np.int32)
    owners = RowOwners(process_at)
    residency = Residency("t", 6, owners.group_at)
    rng, hotness = np.random.default_rng(3), Hotness()
    keys = rng.integers(0, 2**63, 30).astype(np.uint64)
    rows = np.arange(30, dtype=np.int32)
    owners.note(rows, keys)
    assert owners.process_of(rows).tolist() == [[0, 3][o] for o in owner_of(keys, 2)]
    for _ in range(100):
        needed = rng.permutation(rows)[:6]
        of = owners.of(needed)
        # At most three of each owner.
        needed = np.concatenate([needed[of == 0][:3], needed[of == 1][:3]])
        residency.check(owners.counts(needed))
        is_made = residency.is_made(needed)
        old, new = needed[is_made], needed[~is_made]
        moves = residency.plan(
            old, new, keys[new], np.zeros(0, bool), hotness, owners=(owners.of(old), owners.of(new))
        )
        if rng.random() < 0.2:
            residency.cancel(moves)
            continue
        residency.commit(moves)
        places = residency.places(needed)
        assert np.unique(places).size == needed.size
        assert (process_at[places] == owners.process_of(needed)).all()
        if rng.random() < 0.2:
            residency.forget(needed[:2])
    with pytest.raises(StoreFullError, match="4 rows on the devices of the process that owns them"):
        residency.check(np.array([1, 4]))


def test_a_table_of_one_process_is_all_its_own():
    owners = RowOwners(np.array([3, 3], np.int32))
    assert owners.group_at is None
    rows = np.arange(4, dtype=np.int32)
    assert owners.process_of(rows).tolist() == [3] * 4
    assert not owners.has(rows).any()
    assert RowOwners(None).has(rows).all()
    assert RowOwners(None).process_of(rows) is None
