# SPDX-License-Identifier: Apache-2.0
"""Rows from anywhere in one array to anywhere in another, once over memory.

>>> import numpy as np
>>> target = np.zeros((3, 2), np.uint32)
>>> copy_rows(target, np.array([2, 0]), np.array([[1, 2], [3, 4]], np.uint32), None)
>>> target.tolist()
[[3, 4], [0, 0], [1, 2]]
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.ops.native import library

Words = npt.NDArray[np.uint32]
Numbers = npt.NDArray[np.integer[Any]]

COPIED = -1
"""What the function returns when it has copied; else the position of a number outside."""


def copy_rows(
    target: Words, to_rows: Numbers | None, source: Words, from_rows: Numbers | None
) -> None:
    """``target[to_rows] = source[from_rows]``; without numbers all rows of a side, in order.

    In C++ without the array between them that numpy makes; without a compiler numpy does it.

    Args:
        target: ``[m, w]`` uint32; rows may lie apart.
        to_rows: ``[n]``, different ones.
        source: ``[k, w]`` uint32; rows may lie apart.
        from_rows: ``[n]``.

    Raises:
        IndexError: a number is below 0 or too large; nothing is copied.
    """
    count = len(target if to_rows is None else to_rows)
    given = len(source if from_rows is None else from_rows)
    if count != given or target.shape[1] != source.shape[1]:
        raise ValueError(
            f"copy_rows: {given} rows of {source.shape[1]} words are to go to {count} rows of "
            f"{target.shape[1]}; both must agree"
        )
    if not count:
        return
    at = _native if library.is_available() else _reference
    outside = at(target, to_rows, source, from_rows, count)
    if outside != COPIED:
        numbers = [None if one is None else int(one[outside]) for one in (to_rows, from_rows)]
        raise IndexError(
            f"copy_rows: rows (to, from) {numbers} at position {outside}: there are "
            f"{len(target)} to write and {len(source)} to read"
        )


def _native(
    target: Words, to_rows: Numbers | None, source: Words, from_rows: Numbers | None, count: int
) -> int:
    function = library.load().jaxsparse_row_copy
    function.restype = ctypes.c_int64
    sides = [_side(target, to_rows), _side(source, from_rows)]
    values = [*sides[0][0], *sides[1][0], count, 4 * target.shape[1]]
    return int(function(*(ctypes.c_int64(value) for value in values)))


def _side(array: Words, rows: Numbers | None) -> tuple[list[int], Any]:
    """Address, stride, rows and the address of their numbers, 0 for none; and what must live."""
    assert array.dtype == np.uint32 and array[0].flags.c_contiguous
    numbers = None if rows is None else np.ascontiguousarray(rows, np.int64)
    at = 0 if numbers is None else int(numbers.ctypes.data)
    return [int(array.ctypes.data), array.strides[0], len(array), at], numbers


def _reference(
    target: Words, to_rows: Numbers | None, source: Words, from_rows: Numbers | None, count: int
) -> int:
    """The meaning, in numpy."""
    outside = np.zeros(count, bool)
    for rows, size in ((to_rows, len(target)), (from_rows, len(source))):
        if rows is not None:
            outside |= (rows < 0) | (rows >= size)
    if outside.any():
        return int(np.argmax(outside))
    into = slice(None) if to_rows is None else to_rows
    target[into] = source if from_rows is None else source[from_rows]
    return COPIED
