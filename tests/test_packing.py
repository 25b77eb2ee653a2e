# SPDX-License-Identifier: Apache-2.0
"""Dedup and bucketing on the host, and what is shipped of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxsparse as js
from jaxsparse.packing import distinct

SMALL, HUGE = 5, 2**58
"""Rows per shard: with the first a code of 4 owners and its index share a 64-bit word and one sort;
with the second, 61 bits a code, they do not from 4 ids on."""


def check_distinct(codes, num_owners, rows_per_shard):
    """Everything `Distinct` promises, from its description."""
    found = distinct(codes, num_owners, rows_per_shard)
    real = codes[codes >= 0]
    values, counts = np.unique(real, return_counts=True)
    assert found.codes.tolist() == values.tolist()
    assert found.counts.tolist() == counts.tolist()
    assert codes[found.order].tolist() == np.repeat(values, counts).tolist()
    assert sorted(found.order.tolist()) == np.flatnonzero(codes >= 0).tolist()
    # Equal codes keep the order they came in: sums do not depend on the sort.
    for part in np.split(found.order, np.cumsum(counts)[:-1]) if counts.size else []:
        assert (np.diff(part) > 0).all()
    owners = values // rows_per_shard
    assert found.bounds.size == num_owners + 1
    for owner in range(num_owners):
        first, last = found.bounds[owner : owner + 2]
        assert (owners[first:last] == owner).all()
    assert found.bounds[0] == 0 and found.bounds[-1] == values.size


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, SMALL - 1)), max_size=60),
    st.sampled_from([SMALL, HUGE]),
)
def test_distinct_on_both_sorts(pairs, rows_per_shard):
    codes = np.array(
        [-1 if owner < 0 else owner * rows_per_shard + row for owner, row in pairs], np.int64
    )
    check_distinct(codes, 4, rows_per_shard)


@pytest.mark.parametrize("rows_per_shard", [SMALL, HUGE])
@pytest.mark.parametrize(
    "codes", [[], [-1], [-1, -1, -1], [0], [0, 0, 0], [4, 3, 2, 1, 0]], ids=str
)
def test_distinct_of_little(codes, rows_per_shard):
    check_distinct(np.array(codes, np.int64), 1, rows_per_shard)


def collection(num_devices, devices, **feature):
    item = js.TableSpec("item", vocabulary_size=1_000, embedding_dim=4, placement="sharded")
    features = [js.FeatureSpec("shown", item), js.FeatureSpec("clicked", item, **feature)]
    return js.EmbeddingCollection(features, mesh=js.make_mesh(devices=devices[:num_devices]))


def test_each_row_is_asked_once_per_device(devices):
    emb = collection(4, devices)
    keys = np.zeros(8, np.int64) + 17
    clicked = js.Ragged.from_lists([[17, 17, 18]] * 8)
    ids = emb.pack({"shown": keys, "clicked": clicked})
    (slab,) = ids.slabs
    rows = np.asarray(slab.rows).reshape(4, 4, slab.capacity)
    num_rows = emb.layout.slabs[0].rows_per_shard
    assert [(device < num_rows).sum() for device in rows] == [2, 2, 2, 2]
    assert ids.need <= 2


def test_padding_takes_no_place(devices):
    emb = collection(2, devices, padding_id=-1)
    keys = np.full((4, 50), -1)
    keys[:, 0] = [1, 2, 3, 4]
    padded = emb.pack({"shown": np.array([1, 2, 3, 4]), "clicked": keys})
    plain = emb.pack({"shown": np.array([1, 2, 3, 4]), "clicked": keys[:, :1]})
    assert padded.need == plain.need
    (slab,) = padded.slabs
    # Two devices of two samples with an id of each feature.
    assert slab.inverse.shape == (2 * (2 + 2),)


def test_id_buffers_are_at_most_a_quarter_larger(devices):
    emb = collection(1, devices)
    for count in (1, 9, 100, 1_234):
        clicked = js.Ragged.from_lengths(np.arange(count) % 1_000, [count])
        (slab,) = emb.pack({"shown": np.array([0]), "clicked": clicked}).slabs
        assert count <= slab.inverse.shape[0] - 1 <= 1.25 * count  # but for the one shown


def test_samples_are_cut_over_the_mesh_in_order(devices):
    emb = collection(4, devices)
    clicked = js.Ragged.from_lists([[1], [], [2, 3], [4], [5, 6, 7]])
    ids = emb.pack({"shown": np.arange(5), "clicked": clicked})
    assert (ids.num_samples, ids.padded_samples) == (5, 8)
    assert np.asarray(ids.lengths("shown")).tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert np.asarray(ids.lengths("clicked")).tolist() == [1, 0, 2, 1, 3, 0, 0, 0]
