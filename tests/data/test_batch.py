# SPDX-License-Identifier: Apache-2.0
"""Batches: columns of equal length, and samples out of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxsparse.data.batch import Batch
from jaxsparse.ragged import Ragged


def make_batch() -> Batch:
    return Batch(
        features={
            "item": np.array([7, 8, 9]),
            "pair": np.array([[1, 2], [3, 4], [5, 6]]),
            "clicked": Ragged.from_lists([[1], [], [2, 3]]),
        },
        dense=np.array([[0.0], [1.0], [2.0]]),
        labels={"click": [0, 1, 0], "buy": [0, 0, 1]},
        weights=[1, 2, 3],
    )


def test_columns_become_float32() -> None:
    batch = make_batch()
    assert batch.num_samples == 3
    assert batch.dense.dtype == batch.weights.dtype == batch.labels["buy"].dtype == np.float32


def test_take_keeps_every_column_of_a_sample_together() -> None:
    batch = make_batch().take([2, 0, 2])
    assert batch.features["item"].tolist() == [9, 7, 9]
    assert batch.features["pair"].tolist() == [[5, 6], [1, 2], [5, 6]]
    assert [bag.tolist() for bag in batch.features["clicked"]] == [[2, 3], [1], [2, 3]]
    assert batch.dense.tolist() == [[2], [0], [2]]
    assert batch.labels["buy"].tolist() == [1, 0, 1]
    assert batch.weights.tolist() == [3, 1, 3]


def test_take_without_optional_columns() -> None:
    batch = Batch({"a": np.array([1, 2])}, labels=np.array([0, 1])).take([1])
    assert batch.dense is None
    assert batch.weights is None
    assert batch.labels.tolist() == [1]


def test_lists_of_keys_stay_exact() -> None:
    batch = Batch({"a": [1, 2**64 - 1]}, labels=[0, 1])
    assert batch.features["a"].tolist() == [1, 2**64 - 1]


def test_no_samples() -> None:
    assert Batch({"a": np.zeros(0, np.int64)}, labels=[]).num_samples == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"labels": None}, "labels are missing; give zeros where none are known"),
        ({"labels": {}}, "labels must name at least one task"),
        ({"labels": [[0], [1]]}, r"labels must have shape \[B\], got \(2, 1\)"),
        ({"labels": {"x": [0, 1], "y": [1]}}, r"labels\['y'\] has 1 samples, but labels have 2"),
        ({"dense": [1.0, 2.0]}, r"dense must have shape \[B, d\], got \(2,\)"),
        ({"dense": [[1.0]]}, "dense has 1 samples, but labels have 2"),
        ({"weights": [1.0]}, "weights has 1 samples, but labels have 2"),
        ({"features": {"a": [1]}}, r"features\['a'\] has 1 samples, but labels have 2"),
        (
            {"features": {"a": Ragged.from_lists([[1]])}},
            r"features\['a'\] has 1 samples, but labels have 2",
        ),
    ],
)
def test_errors(change: dict[str, Any], text: str) -> None:
    arguments: dict[str, Any] = {"features": {"a": [1, 2]}, "labels": [0, 1]}
    with pytest.raises(ValueError, match=text):
        Batch(**(arguments | change))
