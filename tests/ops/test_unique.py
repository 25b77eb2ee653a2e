# SPDX-License-Identifier: Apache-2.0
"""`unique`: every implementation against its meaning, bitwise."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxsparse.ops.native import library
from jaxsparse.ops.unique import unique
from jaxsparse.ops.unique.cases import CASES
from jaxsparse.ops.unique.reference import unique_reference

needs_native = pytest.mark.skipif(
    not library.is_available(), reason=f"no native library: {library.why_not()}"
)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("native", marks=needs_native)])
def test_groups_equal_rows(implementation):
    def all_cases(rows):
        return [
            unique(array, case.num_rows, implementation=implementation)
            for case, array in zip(CASES, rows, strict=True)
        ]

    rows = [case.rows() for case in CASES]
    for case, given, got in zip(CASES, rows, jax.jit(all_cases)(rows), strict=True):
        for part, want in zip(got, unique_reference(given, case.num_rows), strict=True):
            np.testing.assert_array_equal(np.asarray(part), want, err_msg=case.name)


def test_the_best_implementation_is_chosen():
    text = jax.jit(lambda rows: unique(rows, 5)).lower(np.zeros(4, np.int32)).as_text()
    assert ("jaxsparse_unique" in text) == library.is_available()


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="unique: there is no implementation 'cuda', expected"):
        unique(np.zeros(4, np.int32), 5, implementation="cuda")


@pytest.mark.parametrize(
    ("rows", "num_rows", "message"),
    [
        (np.zeros((2, 2), np.int32), 5, r"rows must be int32 \[N\], got int32 \[2, 2\]"),
        (np.zeros(2, np.uint32), 5, r"rows must be int32 \[N\], got uint32 \[2\]"),
        (np.zeros(2, np.int32), 2**31, r"num_rows must be in \[0, 2\*\*31\), got 2147483648"),
        (np.zeros(2, np.int32), -1, r"num_rows must be in \[0, 2\*\*31\), got -1"),
    ],
)
def test_other_rows_are_refused(rows, num_rows, message):
    with pytest.raises(ValueError, match=f"unique: {message}"):
        unique(rows, num_rows)


def test_batches_of_rows_are_grouped_one_by_one():
    rows = np.array([[3, 1, 3], [9, 0, -1]], np.int32)
    got = jax.vmap(lambda each: unique(each, 5))(rows)
    for number, each in enumerate(rows):
        for one, expected in zip(got, unique(each, 5, implementation="xla"), strict=True):
            np.testing.assert_array_equal(one[number], expected)


def test_native_says_when_it_is_not_there(monkeypatch):
    monkeypatch.setattr(library, "_loaded", lambda: "no compiler")
    with pytest.raises(RuntimeError, match="not there: no compiler"):
        unique(np.zeros(4, np.int32), 5, implementation="native")
