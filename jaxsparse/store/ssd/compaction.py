# SPDX-License-Identifier: Apache-2.0
"""Rewriting of segments that hold much garbage."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

import numpy as np

from jaxsparse.durable import fault_point
from jaxsparse.store.ssd.checksums import Bytes, Int64s
from jaxsparse.store.ssd.files import SegmentFiles
from jaxsparse.store.ssd.filling import Appender, Filling
from jaxsparse.store.ssd.open_files import OpenFiles
from jaxsparse.store.ssd.segment import Segment
from jaxsparse.store.ssd.wanted import Wanted
from jaxsparse.store.ssd.write_behind import WriteBehind


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
    after = -(-sum(s.num_live for s in (*worn, *small)) // capacity)
    if len(small) > 1 and after < before:
        worn += small
    return sorted(worn, key=lambda s: s.number)


class Rewriting:
    """Copies of live rows in new segments, which nobody knows yet."""

    def __init__(self, begin: Callable[[], Filling], writes: WriteBehind) -> None:
        """``begin`` makes a new segment."""
        self.new: list[Segment] = []
        self._writes = writes
        self._appender = Appender(begin, self._sealed)

    def _sealed(self, segment: Segment) -> None:
        self.new.append(segment)
        self._writes.submit(segment)

    def run(
        self,
        old: Sequence[Segment],
        files: SegmentFiles,
        read_into: Callable[[list[Wanted], Bytes], None],
    ) -> Int64s:
        """Copies the rows, one old segment at a time; where they lay, in the order of the new ones.

        Args:
            old: segments on the disk.
            files: that they are read from.
            read_into: reads rows of them, checked.

        Raises:
            DamagedSegmentError: one is damaged.
        """
        sources = [np.empty(0, np.int64)]
        for segment in old:
            numbers = segment.live_rows()
            if not numbers.size:
                continue
            future = files.start_read(segment, 0, segment.shape.columns_bytes)
            columns = files.finish_columns(segment, future)
            lay = segment.locations(numbers)
            rows = np.empty((numbers.size, segment.shape.row_bytes), np.uint8)
            # Not pinned: only compaction takes segments away. Released meanwhile does not matter.
            read_into([Wanted(segment, lay, np.arange(numbers.size), None)], rows)
            stamps = lay if columns.stamps is None else columns.stamps[numbers]
            self._appender.add(columns.keys[numbers], rows, stamps, np.empty_like(lay))
            sources.append(lay)
        self._appender.seal()
        return np.concatenate(sources)

    def discard(self) -> None:
        """Deletes what was written."""
        self._writes.forget(self.new)
        for segment in self.new:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(segment.path)


def remove(old: Sequence[Segment], open_files: OpenFiles) -> None:
    """Deletes segments that nobody reads and no manifest names."""
    for segment in old:
        fault_point("ssd_in_delete")
        open_files.forget(segment)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(segment.path)
