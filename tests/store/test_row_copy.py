# SPDX-License-Identifier: Apache-2.0
"""Rows from anywhere to anywhere, in C++ and in numpy, against a loop."""

from __future__ import annotations

import numpy as np
import pytest

from jaxsparse.ops.native import library
from jaxsparse.store.row_copy import copy_rows


@pytest.fixture(params=["native", "numpy"])
def implementation(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(library, "is_available", lambda: False)
    elif not library.is_available():
        pytest.skip("no compiler")


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("width", [1, 5, 130])
@pytest.mark.parametrize("numbered", ["both", "to", "from", "none"])
def test_rows_are_those_of_a_loop(width, numbered):
    rng = np.random.default_rng(0)
    source = rng.integers(0, 2**32, (70, width + 3), np.uint32)[:, 2 : 2 + width]
    target = rng.integers(0, 2**32, (90, width + 1), np.uint32)
    want = target.copy()
    to_rows = rng.permutation(90)[:40].astype(np.int32) if numbered in ("both", "to") else None
    from_rows = rng.integers(0, 70, 40) if numbered in ("both", "from") else None
    read = source if from_rows is not None else source[:40]
    written = target[:, 1:] if to_rows is not None else target[:40, 1:]
    for i in range(40):
        row = i if to_rows is None else to_rows[i]
        want[row, 1:] = read[i if from_rows is None else from_rows[i]]
    copy_rows(written, to_rows, read, from_rows)
    assert np.array_equal(target, want)


@pytest.mark.usefixtures("implementation")
def test_rows_outside_are_an_error():
    target, source = np.zeros((3, 2), np.uint32), np.ones((4, 2), np.uint32)
    with pytest.raises(IndexError, match=r"\[1, 4\] at position 1: there are 3 to write and 4 to"):
        copy_rows(target, np.array([0, 1]), source, np.array([3, 4]))
    with pytest.raises(IndexError, match=r"\[-1, None\] at position 2"):
        copy_rows(target, np.array([0, 1, -1, 2]), source, None)
    assert not target.any()
    with pytest.raises(ValueError, match=r"4 rows of 2 words are to go to 3 rows of 2"):
        copy_rows(target, None, source, None)
