# SPDX-License-Identifier: Apache-2.0
"""Counts of keys, against a Counter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import jaxsparse as js


def counted(*batches: Any) -> js.KeyCounts:
    seen = js.KeyCounts()
    for batch in batches:
        seen.update(batch)
    return seen


def test_batches_add_up_to_what_a_counter_counts() -> None:
    rng = np.random.default_rng(0)
    batches = [rng.zipf(1.3, 500) % 97 - 40 for _ in range(5)]
    want = Counter(np.concatenate(batches).tolist())
    seen = counted(*batches)
    order = sorted(want, key=lambda key: (-want[key], key))
    assert seen.top().tolist() == order
    assert seen.counts().tolist() == [want[key] for key in order]
    assert (seen.num_keys, seen.num_occurrences, seen.num_nulls) == (len(want), 2500, 0)
    assert seen.top(3).tolist() == order[:3] and seen.top(0).tolist() == []
    assert seen.top(min_count=20).tolist() == [key for key in order if want[key] >= 20]


BIG = 2**64 - 1


@pytest.mark.parametrize(
    ("keys", "top", "nulls"),
    [
        (np.array([[3, 3], [1, 3]], np.int8), [3, 1], 0),
        (np.array([BIG, 1, BIG], np.uint64), [BIG, 1], 0),
        ([BIG, 1, None, BIG], [BIG, 1], 1),
        (pa.array([[1, 2], [2, 3], None], pa.list_(pa.int64(), 2)), [2, 1, 3], 0),
        (js.Ragged.from_lists([[5], [], [5, 2]]), [5, 2], 0),
        (np.array(["b", "a", "b"]), ["b", "a"], 0),
        (["b", None, "b", "c"], ["b", "c"], 1),
        (pa.array([[1, 2], None, [2]]), [2, 1], 0),
        (pa.chunked_array([["x"], ["y", None, "y"]]).dictionary_encode(), ["y", "x"], 1),
        (pd.Series([2**53 + 1, None, 2**53 + 1], dtype="Int64"), [2**53 + 1], 1),
        (pd.Series(["b", None, "b"]), ["b"], 1),
        (pl.Series(["q", "q", None]), ["q"], 1),
        (pl.Series([[7], [7, 8]]), [7, 8], 0),
        ([None, None], [], 2),
        ([], [], 0),
    ],
)
def test_every_kind_of_column(keys: Any, top: list[Any], nulls: int) -> None:
    seen = counted(keys)
    assert seen.top().tolist() == top
    assert seen.num_nulls == nulls


def test_the_frequent_keys_get_rows_of_their_own() -> None:
    seen = counted(["hat", "shoe", "shoe", "sock"])
    keys = js.Hashed(exact_keys=seen.top(2))
    assert keys.rows(np.array(["shoe", "hat"]), 10).tolist() == [0, 1]
    assert 2 <= keys.rows(np.array(["sock"]), 10)[0] < 10


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        ([[1.5]], "keys must be integers or strings, got double"),
        ([pd.Series([1, None])], "keys must be integers or strings, got double"),
        ([[1, "a"]], "keys must be integers or strings: "),
        ([["a", 1]], "keys must be integers or strings: "),
        ([[2**64]], "keys must be integers or strings: "),
        ([[2**63, -1]], "keys must be integers or strings: "),
        ([[1], ["a"]], "keys were int64 before, now they are large_string"),
        ([[True]], "keys must be integers or strings, got bool"),
    ],
)
def test_what_is_no_key(batches: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        counted(*batches)


def test_arguments_of_top() -> None:
    for wrong in ({"num_keys": -1}, {"min_count": 0}):
        with pytest.raises(ValueError, match="num_keys must be None or >= 0 and min_count >= 1"):
            counted([1]).top(**wrong)
