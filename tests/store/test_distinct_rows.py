# SPDX-License-Identifier: Apache-2.0
"""`distinct_rows` against a dict, with marks that earlier batches left."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxsparse.ops.native import library
from jaxsparse.store.index import RowMarks, distinct_rows


def by_dict(rows):
    """Distinct rows, inverse and counts."""
    place, counts, inverse = {}, [], []
    for row in rows:
        if row >= 0 and row not in place:
            place[row] = len(place)
            counts.append(0)
        inverse.append(place.get(row, -1))
        if row >= 0:
            counts[place[row]] += 1
    return list(place), inverse, counts


def check(rows, marks):
    given_rows = np.array(rows, np.int32)
    found = distinct_rows(given_rows, marks)
    with library.left_out():
        plain = distinct_rows(given_rows, marks)
    for part, same, want in zip(found, plain, by_dict(rows), strict=True):
        assert part.tolist() == want == same.tolist()
        assert part.dtype == same.dtype == np.int32


@given(batches=st.lists(st.lists(st.integers(-1, 12) | st.integers(-1, 3000)), max_size=6))
def test_any_batches(batches):
    marks = RowMarks()
    for rows in batches:
        check(rows, marks)


def test_marks_of_other_batches_are_not_trusted():
    """Those of another call may point at any place of this one's rows."""
    rng = np.random.default_rng(0)
    marks = RowMarks()
    for _ in range(30):
        check(rng.permutation(200)[: rng.integers(0, 200)].tolist(), marks)
        check(np.minimum(rng.zipf(1.2, 300), 400).tolist(), marks)


def test_rows_that_cannot_be():
    with pytest.raises(ValueError, match=r"or row numbers, got -2 at position 1"):
        distinct_rows(np.array([3, -2, -3], np.int32), RowMarks())
    for rows in (np.zeros(3, np.int64), np.zeros((2, 2), np.int32)):
        with pytest.raises(ValueError, match="rows must be a vector of int32, got"):
            distinct_rows(rows, RowMarks())
