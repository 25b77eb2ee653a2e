# SPDX-License-Identifier: Apache-2.0
"""Which segments are worth rewriting."""

from __future__ import annotations

from collections.abc import Sequence

from jaxsparse.store.ssd.segment import Segment


def choose(segments: Sequence[Segment], max_garbage: float, capacity: int) -> list[Segment]:
    """Segments with more garbage than that; and small ones, if that makes fewer of them.

    Args:
        segments: that are on the disk.
        max_garbage: share of a segment's rows that may be released.
        capacity: rows of a full segment. A flush leaves a smaller one.
    """
    worn = [s for s in segments if s.num_released > max_garbage * s.shape.num_rows]
    small = [
        s
        for s in segments
        if s.num_released <= max_garbage * s.shape.num_rows
        and s.num_live < (1 - max_garbage) * capacity
    ]
    before = len(worn) + len(small)
    if -(-sum(s.num_live for s in (*worn, *small)) // capacity) < before and len(small) > 1:
        worn += small
    return sorted(worn, key=lambda s: s.number)
