# SPDX-License-Identifier: Apache-2.0
"""Distinct rows of a batch in the order of first occurrence, in time linear in the batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxsparse.ops.native import library
from jaxsparse.store.index import native
from jaxsparse.store.index.arguments import Int32s


class DistinctRows(NamedTuple):
    """The rows of a batch, each once."""

    rows: Int32s
    """``[u]``, in the order of first occurrence."""
    inverse: Int32s
    """``[n]``: where in ``rows`` each entry's row is; -1 for entries of -1."""
    counts: Int32s
    """``[u]``: entries of each row."""


class RowMarks:
    """Scratch memory of `distinct_rows`, four bytes a row, kept from batch to batch.

    Of one thread: two calls must not use it at once.
    """

    def __init__(self) -> None:
        self._marks = np.zeros(0, np.int32)

    def up_to(self, num_rows: int) -> Int32s:
        """Marks of at least ``num_rows`` rows; what is in them does not matter."""
        if num_rows > self._marks.size:
            # The old are let go first, and fresh zeros take memory only where they are touched.
            size = max(num_rows, self._marks.size * 5 // 4)
            del self._marks
            self._marks = np.zeros(size, np.int32)
        return self._marks


def distinct_rows(rows: Int32s, marks: RowMarks) -> DistinctRows:
    """The distinct rows of a batch; entries of -1 (no row) are left out.

    Args:
        rows: ``[n]`` int32, as from `KeyIndex.find`.
        marks: scratch memory, for the next batch too.

    Raises:
        ValueError: a row is below -1, or ``rows`` is no vector of int32.

    >>> found = distinct_rows(np.array([7, -1, 2, 7], np.int32), RowMarks())
    >>> found.rows.tolist(), found.inverse.tolist(), found.counts.tolist()
    ([7, 2], [0, -1, 1, 0], [2, 1])
    """
    if rows.ndim != 1 or rows.dtype != np.int32:
        raise ValueError(
            f"rows must be a vector of int32, got {rows.dtype} of shape {rows.shape}; "
            "pass what `find` or `insert` returned"
        )
    if rows.size and rows.min() < -1:
        at = int(np.argmax(rows < -1))
        raise ValueError(f"rows must be -1 (none) or row numbers, got {rows[at]} at position {at}")
    if library.is_available():
        return _native(np.ascontiguousarray(rows), marks)
    return _reference(rows)


def _native(rows: Int32s, marks: RowMarks) -> DistinctRows:
    scratch = marks.up_to(int(rows.max(initial=-1)) + 1)
    distinct, inverse, counts = (np.empty(rows.size, np.int32) for _ in range(3))
    found = native.function("distinct_rows")(
        *(native.address(rows), rows.size),
        *(native.address(array) for array in (scratch, distinct, inverse, counts)),
    )
    return DistinctRows(distinct[:found], inverse, counts[:found])


def _reference(rows: Int32s) -> DistinctRows:
    """The meaning, in numpy."""
    is_row = rows >= 0
    found, first, inverse, counts = np.unique(
        rows[is_row], return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(first)
    place = np.empty(order.size, np.int32)
    place[order] = np.arange(order.size, dtype=np.int32)
    out = np.full(rows.size, -1, np.int32)
    out[is_row] = place[inverse]
    return DistinctRows(found[order], out, counts[order].astype(np.int32))
