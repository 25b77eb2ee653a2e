# SPDX-License-Identifier: Apache-2.0
"""Both plans of a batch name the same sums: ids into bags, and bags' gradients into rows."""

from __future__ import annotations

import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.ladder import smallest_shape

RAGGED = js.Ragged.from_lists([[1, 2, 2], [], [3, 49, 3, 3], [7], [2, 2, 0]])
WEIGHTED = js.Ragged(RAGGED.values, RAGGED.row_splits, np.arange(1, 12, dtype=np.float32))
FIXED = np.array([[1, 2], [-1, 3], [3, 3], [-1, -1], [49, 0]])
UNPOOLED = {"combiner": None, "max_length": 4}

BATCHES = {
    "one id a bag": {"a": ({}, FIXED[:, 1] % 50), "b": ({}, FIXED[:, 0] % 50)},
    "fixed": {"a": ({"padding_id": -1}, FIXED), "b": ({**UNPOOLED, "padding_id": -1}, FIXED)},
    "ragged": {"a": ({}, RAGGED), "b": (UNPOOLED, RAGGED)},
    "all": {
        "a": ({"combiner": "mean"}, WEIGHTED),
        "b": ({"padding_id": -1}, FIXED),
        "c": (UNPOOLED, RAGGED),
        "d": ({}, FIXED[:, 1] % 50),
    },
}


def packed(devices, batch, num_devices, path):
    table = js.TableSpec("t", vocabulary_size=50, embedding_dim=4, placement="sharded")
    features = [js.FeatureSpec(name, table, **kind) for name, (kind, _) in batch.items()]
    emb = js.EmbeddingCollection(features, mesh=js.make_mesh(devices=devices[:num_devices]))
    prepared = emb.prepare({name: keys for name, (_, keys) in batch.items()})
    needs = prepared.needs()
    return emb, prepared.pack([smallest_shape(need) for need in needs], needs, path).slabs[0]


def by_device(array, num_devices):
    return np.asarray(array).reshape(num_devices, -1)


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_plans_name_the_same_sums(devices, batch, num_devices):
    emb, levels = packed(devices, batch, num_devices, "xla")
    _, bags = packed(devices, batch, num_devices, "native")
    np.testing.assert_array_equal(levels.inverse, bags.inverse)
    samples = -(-5 // num_devices)
    widths = {name: spec.max_length or 1 for name, spec in emb.feature_specs.items()}
    inverse = by_device(bags.inverse, num_devices)
    row_bags = by_device(bags.plan.row_bags, num_devices)
    row_offsets = by_device(bags.plan.row_offsets, num_devices)
    num_ids, num_rows = inverse.shape[1], row_offsets.shape[1] - 1
    num_bags = samples * sum(widths.values())
    ragged_bags = by_device(levels.plan.bag, num_devices)
    num_fixed = num_bags - samples * sum(widths[name] for name in levels.ragged)
    for device in range(num_devices):
        bag_of = []
        start = 0
        for name, width in levels.fixed:
            pooled = emb.feature_specs[name].combiner is not None
            for sample in range(samples):
                for position in range(width):
                    place = sample if pooled else sample * widths[name] + position
                    bag_of.append(start + place)
            start += samples * widths[name]
        bag_of += (num_fixed + ragged_bags[device]).tolist()
        # Ids into bags.
        if bags.plan.bag_offsets is None:
            assert bag_of == list(range(num_bags)) and len(batch) == 2
        else:
            offsets = by_device(bags.plan.bag_offsets, num_devices)[device]
            assert offsets.size == num_bags + 1
            told = np.repeat(np.arange(num_bags), np.diff(offsets)).tolist()
            assert told == [bag for bag in bag_of if bag < num_bags]
        # Gradients into rows: per row the bags of its ids, in the order of the buffer.
        for row in range(num_rows):
            begin, end = row_offsets[device, row : row + 2]
            ids = np.flatnonzero(inverse[device] == row)
            assert row_bags[device, begin:end].tolist() == [bag_of[i] for i in ids]
            if bags.weights is not None:
                row_ids = by_device(bags.plan.row_ids, num_devices)[device]
                assert row_ids[begin:end].tolist() == ids.tolist()
        end = row_offsets[device, -1]
        assert end == (inverse[device] < num_rows).sum()
        assert (row_bags[device, end:] == num_bags).all()
        if bags.weights is not None:
            assert (by_device(bags.plan.row_ids, num_devices)[device, end:] == num_ids).all()
    assert (bags.weights is None) == (bags.plan.row_ids is None)
