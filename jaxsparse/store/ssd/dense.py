# SPDX-License-Identifier: Apache-2.0
"""Rows that lie close together, through tensorstore: gaps between them are read too."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from jaxsparse.store.ssd.checksums import Bytes
from jaxsparse.store.ssd.files import SegmentFiles
from jaxsparse.store.ssd.wanted import Span, Wanted, spans, take

LEAST_SHARE = 0.05
"""Of a segment's rows, from which they are read so."""
LEAST_ROWS = 16
"""As few of a small segment are scattered, whatever their share."""
GAP_BYTES = 64 << 10
"""Not asked for, and cheaper to read than a second read is."""
MOST_BYTES = 1 << 20
"""Of a read: rows of one are checked while others are under way."""
IN_FLIGHT = 16


def is_dense(wanted: Wanted) -> bool:
    """Whether rows lie close enough."""
    count = wanted.locations.size
    return count >= max(LEAST_ROWS, LEAST_SHARE * wanted.segment.shape.num_rows)


def read_dense(files: SegmentFiles, wanted: Sequence[Wanted], out: Bytes) -> None:
    """Reads rows into ``out``.

    Raises:
        DamagedSegmentError: a file is missing, cut or changed.
    """
    reads: deque[tuple[Span, Any]] = deque()
    for one in wanted:
        for span in spans(one, GAP_BYTES, MOST_BYTES):
            if len(reads) == IN_FLIGHT:
                _finish(files, *reads.popleft(), out)
            reads.append((span, files.start_read(one.segment, span.begin, span.end)))
    while reads:
        _finish(files, *reads.popleft(), out)


def _finish(files: SegmentFiles, span: Span, future: Any, out: Bytes) -> None:
    segment = span.wanted.segment
    data = files.finish_read(segment, future)
    if len(data) < span.end - span.begin:
        raise files.damaged(segment, f"it ends before row {span.base}")
    bad = take(span, data, out)
    if bad is not None:
        raise files.damaged(segment, f"the checksum of row {bad} differs")
