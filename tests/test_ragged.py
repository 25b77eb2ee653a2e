# SPDX-License-Identifier: Apache-2.0
"""Ragged bags against plain Python lists."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxsparse.ragged import Ragged, row_splits_from_lengths

BAGS = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=8)


def to_lists(ragged: Ragged) -> list[list[Any]]:
    """The bags by the definition of row_splits."""
    splits, values = ragged.row_splits.tolist(), ragged.values.tolist()
    return [values[splits[b] : splits[b + 1]] for b in range(len(splits) - 1)]


def weights_of(bags: list[list[int]]) -> list[list[float]]:
    """Other numbers of the same shape."""
    return [[b + i / 4 for i in range(len(bag))] for b, bag in enumerate(bags)]


def weight_lists(ragged: Ragged) -> list[list[float]]:
    assert ragged.weights is not None
    assert ragged.weights.dtype == np.float32
    return to_lists(Ragged(ragged.weights, ragged.row_splits))


# ---------------------------------------------------------------- making one


@given(BAGS)
def test_lists_round_trip(bags: list[list[int]]) -> None:
    ragged = Ragged.from_lists(bags, weights_of(bags))
    assert ragged.values.dtype == np.int64
    assert ragged.row_splits.dtype == ragged.lengths.dtype == np.int64
    assert to_lists(ragged) == bags
    assert weight_lists(ragged) == weights_of(bags)
    assert ragged.lengths.tolist() == [len(bag) for bag in bags]
    assert len(ragged) == ragged.num_bags == len(bags)
    assert [bag.tolist() for bag in ragged] == bags
    again = Ragged.from_lengths(ragged.values, ragged.lengths.astype(np.int32))
    assert to_lists(again) == bags
    assert again.weights is None


def test_from_lists_keeps_keys_exactly() -> None:
    for bags in ([[1, 2**63], [2**64 - 1]], [[-1], [2**64 - 1]], [["a"], [b"b", "c"]], [[1, "a"]]):
        assert to_lists(Ragged.from_lists(bags)) == bags
    assert Ragged.from_lists([[1, 2**63]]).values.dtype == np.uint64
    small = Ragged.from_lists([np.array([1], np.int8), np.array([], np.int8)])
    assert small.values.dtype == np.int8
    mixed = Ragged.from_lists([np.array([1], np.int64), np.array([2**64 - 1], np.uint64)])
    assert to_lists(mixed) == [[1], [2**64 - 1]]
    assert Ragged.from_lists([np.array(["a"]), np.array(["bcd"])]).values.tolist() == ["a", "bcd"]
    assert Ragged([1, 2**63], [0, 2]).values.dtype == np.uint64  # type: ignore[arg-type]


def test_no_bags_and_only_empty_bags() -> None:
    for ragged in (Ragged.from_lists([]), Ragged.concatenate([]), Ragged.from_lengths([], [])):
        assert ragged.row_splits.tolist() == [0]
        assert ragged.values.shape == (0,)
        assert len(ragged) == 0
    assert Ragged.from_lists([[], []], [[], []]).row_splits.tolist() == [0, 0, 0]
    assert Ragged(np.zeros(0), np.array([0, 0])).lengths.tolist() == [0]


def test_weights_become_float32() -> None:
    for dtype in (np.float64, np.float16, np.int32, ml_dtypes.bfloat16):
        ragged = Ragged(np.array([4, 5]), np.array([0, 2]), np.array([1, 2], dtype))
        assert weight_lists(ragged) == [[1.0, 2.0]]


def test_b10_row_splits_beyond_32_bits() -> None:
    lengths = np.full(3, 2**30, np.int32)
    splits = row_splits_from_lengths(lengths)
    assert splits.dtype == np.int64
    assert splits.tolist() == [0, 2**30, 2**31, 3 * 2**30]
    assert row_splits_from_lengths(np.full(300, 255, np.uint8))[-1] == 300 * 255


@given(st.lists(st.integers(0, 2**50), max_size=20))
def test_row_splits_against_python_integers(lengths: list[int]) -> None:
    splits = row_splits_from_lengths(lengths).tolist()
    assert splits == [sum(lengths[:b]) for b in range(len(lengths) + 1)]


# ---------------------------------------------------------------- bags of bags


@given(BAGS, st.integers(-3, 10), st.integers(-3, 10))
def test_slice_is_the_slice_of_the_list(bags: list[list[int]], start: int, stop: int) -> None:
    got = Ragged.from_lists(bags, weights_of(bags)).slice(start, stop)
    assert to_lists(got) == bags[start:stop]
    assert weight_lists(got) == weights_of(bags)[start:stop]
    assert got.row_splits[0] == 0


@given(BAGS.filter(len), st.data())
def test_take_is_indexing(bags: list[list[int]], data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, len(bags) - 1), max_size=12))
    got = Ragged.from_lists(bags, weights_of(bags)).take(indices)
    assert to_lists(got) == [bags[i] for i in indices]
    assert weight_lists(got) == [weights_of(bags)[i] for i in indices]


@given(st.lists(BAGS, max_size=4))
def test_concatenate_is_addition(parts: list[list[list[int]]]) -> None:
    got = Ragged.concatenate([Ragged.from_lists(bags, weights_of(bags)) for bags in parts])
    assert to_lists(got) == [bag for bags in parts for bag in bags]
    if parts:
        assert weight_lists(got) == [bag for bags in parts for bag in weights_of(bags)]
    bare = Ragged.concatenate([Ragged.from_lists(bags) for bags in parts])
    assert bare.weights is None


def test_concatenate_keeps_keys_exactly() -> None:
    def join(*values: Any) -> np.ndarray:
        parts = [Ragged.from_lengths(np.asarray(v), [len(v)]) for v in values]
        return Ragged.concatenate(parts).values

    assert join(np.array([1], np.int32), np.array([2**32 - 1], np.uint32)).tolist() == [
        1,
        2**32 - 1,
    ]
    assert join(np.array([2**64 - 1], np.uint64), []).tolist() == [2**64 - 1]
    assert join([], ["a"], np.array(["bcd"], object)).tolist() == ["a", "bcd"]
    assert join(["é"], np.array(["é".encode()])).tolist() == ["é", "é".encode()]
    with pytest.raises(TypeError, match="keys of int64 and uint64 have no exact common dtype"):
        join(np.array([1]), np.array([2**63], np.uint64))
    with pytest.raises(TypeError, match="keys of <U1 and int64 have no exact common dtype"):
        join([1], ["a"])


# ---------------------------------------------------------------- pyarrow


@pytest.mark.parametrize("list_type", [pa.list_, pa.large_list])
def test_from_arrow(list_type: Any) -> None:
    bags = [[720575940631797753, -(2**63)], None, [], [2**63 - 1], [5]]
    column = pa.array(bags, list_type(pa.int64()))
    want = [bag or [] for bag in bags]
    assert to_lists(Ragged.from_arrow(column)) == want
    assert to_lists(Ragged.from_arrow(column.slice(1, 3))) == want[1:4]
    chunked = pa.chunked_array([column.slice(3), column.slice(0, 3), column.slice(0, 0)])
    assert to_lists(Ragged.from_arrow(chunked)) == want[3:] + want[:3]
    assert to_lists(Ragged.from_arrow(pa.chunked_array([], column.type))) == []


def test_from_arrow_keys_under_a_null_list_do_not_exist() -> None:
    offsets, mask = pa.array([0, 2, 3, 4], pa.int32()), pa.array([False, True, False])
    column = pa.ListArray.from_arrays(offsets, pa.array([1, 2, 3, 4]), mask=mask)
    assert to_lists(Ragged.from_arrow(column)) == [[1, 2], [], [4]]
    pairs = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))
    assert to_lists(Ragged.from_arrow(pairs)) == [[1, 2], [], [3, 4]]


def test_from_arrow_strings_and_dictionaries() -> None:
    bags = [["b", "a"], [], ["b"]]
    plain = pa.array(bags, pa.list_(pa.string()))
    assert to_lists(Ragged.from_arrow(plain)) == bags
    codes = pa.array(["b", "a", "b"]).dictionary_encode()
    encoded = pa.ListArray.from_arrays(pa.array([0, 2, 2, 3], pa.int32()), codes)
    other = pa.ListArray.from_arrays(
        pa.array([0, 1], pa.int32()), pa.array(["a"]).dictionary_encode()
    )
    column = pa.chunked_array([encoded, other])
    assert to_lists(Ragged.from_arrow(column)) == [*bags, ["a"]]


def test_from_arrow_weights() -> None:
    keys = pa.chunked_array([[[1, 2]], [[], [3]]], pa.list_(pa.int64()))
    weights = pa.chunked_array([[[0.5, 1.0], []], [[2.0]]], pa.list_(pa.float64()))
    assert weight_lists(Ragged.from_arrow(keys, weights)) == [[0.5, 1.0], [], [2.0]]
    with pytest.raises(ValueError, match="bag 0 has 2 keys but 1 weights"):
        Ragged.from_arrow(keys, pa.array([[0.5], [], [2.0]]))
    with pytest.raises(ValueError, match="3 bags of keys but 1 of weights"):
        Ragged.from_arrow(keys, pa.array([[0.5, 1.0]]))


def test_from_arrow_refuses_nulls_in_lists_and_flat_columns() -> None:
    chunks = [[[1]], [None, [], [2, None]]]
    with pytest.raises(ValueError, match="null inside the list of bag 3"):
        Ragged.from_arrow(pa.chunked_array(chunks, pa.list_(pa.int64())))
    with pytest.raises(TypeError, match="expected a pyarrow column of lists, got int64"):
        Ragged.from_arrow(pa.array([1, 2]))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("splits", "text"),
    [
        ([2, 0, 1], r"did you pass lengths\? use `Ragged\.from_lengths`"),
        ([], r"must have B \+ 1 entries, got none; no bags is \[0\]"),
        ([0, 2], r"must start with 0 and end with the number of values, 3, got 0 and 2"),
        ([1, 3], r"must start with 0 and end with the number of values, 3, got 1 and 3"),
        ([0, 2, 1, 3], r"must not fall, got 2 then 1 at bag 1"),
        ([0, 4, -1, 3], r"must not fall, got 4 then -1 at bag 1"),
        ([[0, 3]], r"`row_splits` must have one dimension, got shape \(1, 2\)"),
    ],
)
def test_splits_that_do_not_add_up(splits: list[Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Ragged(np.array([7, 8, 9]), np.array(splits))


def test_other_refusals() -> None:
    values = np.array([7, 8, 9])
    with pytest.raises(TypeError, match="`row_splits` must be integers, got float64"):
        Ragged(values, np.array([0.0, 3.0]))
    with pytest.raises(ValueError, match=r"`values` must have one dimension, got shape \(1, 3\)"):
        Ragged(values[None], np.array([0, 3]))
    with pytest.raises(ValueError, match=r"one entry per value, shape \(3,\), got \(2,\)"):
        Ragged(values, np.array([0, 3]), np.ones(2))
    with pytest.raises(TypeError, match="`weights` must be numbers, got <U1"):
        Ragged(values, np.array([0, 3]), np.array(["a", "b", "c"]))
    with pytest.raises(ValueError, match="`lengths` must add up to the number of values, 3, got 4"):
        Ragged.from_lengths(values, [4])
    with pytest.raises(ValueError, match="`lengths` must not be negative, got -1 at bag 1"):
        Ragged.from_lengths(values, [4, -1])
    with pytest.raises(TypeError, match=r"one list per bag, got 3 at bag 1; an empty bag is \[\]"):
        Ragged.from_lists([[1], 3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="one list per bag, got 'shoe' at bag 0"):
        Ragged.from_lists(["shoe"])
    with pytest.raises(ValueError, match="bag 1 has 2 keys but 1 weights"):
        Ragged.from_lists([[1], [2, 3]], [[1.0], [1.0]])
    with pytest.raises(ValueError, match="2 bags of keys but 1 of weights"):
        Ragged.from_lists([[1], [2]], [[1.0]])
    with pytest.raises(ValueError, match="part 1 has weights and part 0 has none"):
        Ragged.concatenate([Ragged.from_lists([[1]]), Ragged.from_lists([[1]], [[1.0]])])
    for index in (-1, 1):
        with pytest.raises(IndexError, match=rf"index {index} at position 1 is outside 0\.\.0"):
            Ragged.from_lists([[1]]).take([0, index])
