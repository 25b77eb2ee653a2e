# SPDX-License-Identifier: Apache-2.0
"""What a read asks of one segment, and how rows get from a file's bytes into the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxsparse.ops.native import library
from jaxsparse.store.ssd.checksums import Bytes, Int64s, row_checksums
from jaxsparse.store.ssd.layout import ROW_MASK
from jaxsparse.store.ssd.native import call
from jaxsparse.store.ssd.segment import Segment


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Rows of one segment that a read asks for."""

    segment: Segment
    locations: Int64s
    """``[n]``, ascending; repeats allowed."""
    targets: Int64s
    """``[n]``: rows of the result."""
    rows: Bytes | None
    """The segment's rows, where they were in memory when the read was asked for."""


@dataclasses.dataclass(frozen=True)
class Span:
    """Rows asked for that are read together, and the bytes that hold them."""

    wanted: Wanted
    first: int
    last: int
    """Entries ``first .. last - 1`` of what is wanted."""
    base: int
    """The row whose begin is the first byte."""
    begin: int
    end: int
    """Bytes of the file."""


def spans(wanted: Wanted, gap_bytes: int, most_bytes: int) -> Iterator[Span]:
    """Cuts what is wanted where neighbours lie further apart than ``gap_bytes``, and every
    ``most_bytes``."""
    size = wanted.segment.shape.row_bytes
    rows = wanted.locations & ROW_MASK
    cuts = np.flatnonzero((np.diff(rows) - 1) * size > gap_bytes) + 1
    for part in np.split(np.arange(rows.size), cuts):
        first, stop = int(part[0]), int(part[-1]) + 1
        while first < stop:
            base = int(rows[first])
            limit = base + max(1, most_bytes // size)
            last = first + int(np.searchsorted(rows[first:stop], limit))
            begin = wanted.segment.data_offset + base * size
            end = wanted.segment.data_offset + (int(rows[last - 1]) + 1) * size
            yield Span(wanted, first, last, base, begin, end)
            first = last


def take(span: Span, data: bytes | memoryview, out: Bytes) -> int | None:
    """Checks the rows of a span and puts them into the result.

    Args:
        span: what ``data`` holds.
        data: bytes ``span.begin ..`` of the file, at least to ``span.end``.
        out: ``[m, row_bytes]``: the result.

    Returns:
        The number of the first damaged row; None where all are as they were written.
    """
    wanted, segment = span.wanted, span.wanted.segment
    locations = wanted.locations[span.first : span.last]
    targets = wanted.targets[span.first : span.last]
    size, array = segment.shape.row_bytes, np.frombuffer(data, np.uint8)
    if library.is_available():
        failed = np.empty(1, np.int64)
        call(
            "jaxsparse_segment_take",
            array,
            span.base,
            size,
            segment.crcs,
            len(locations),
            locations,
            targets,
            out,
            failed,
        )
        return int(locations[failed[0]] & ROW_MASK) if failed[0] >= 0 else None
    numbers = locations & ROW_MASK
    count = (span.end - span.begin) // size
    rows = array[: count * size].reshape(count, size)[numbers - span.base]
    bad = np.flatnonzero(row_checksums(rows, locations) != segment.crcs[numbers])
    out[targets] = rows
    return int(numbers[bad[0]]) if bad.size else None
