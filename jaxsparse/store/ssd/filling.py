# SPDX-License-Identifier: Apache-2.0
"""Segments while rows are added to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxsparse.store.ssd.checksums import Bytes, Int64s, row_checksums
from jaxsparse.store.ssd.layout import SegmentShape, Uint64s, aligned_bytes, aligned_size
from jaxsparse.store.ssd.segment import Segment, segment_name


class Filling:
    """A segment with room. Rows can be read, from memory, as soon as `add` returns."""

    def __init__(
        self, number: int, folder: int, path: Path, capacity: int, row_bytes: int, moved: bool
    ) -> None:
        """An empty one of ``capacity`` rows; ``path`` is of its folder."""
        self.capacity = capacity
        memory = aligned_bytes(aligned_size(capacity * row_bytes))
        self.segment = Segment(
            number=number,
            folder=folder,
            shape=SegmentShape(0, row_bytes, moved),
            path=path / segment_name(number),
            crcs=np.empty(capacity, np.uint32),
            released=np.zeros(capacity, np.bool_),
            keys=np.empty(capacity, np.uint64),
            stamps=np.empty(capacity, np.int64) if moved else None,
            rows=memory[: capacity * row_bytes].reshape(capacity, row_bytes),
            memory=memory,
        )

    @property
    def room(self) -> int:
        """Rows that can still be added."""
        return self.capacity - self.segment.shape.num_rows

    def add(self, keys: Uint64s, rows: Bytes, stamps: Int64s | None) -> Int64s:
        """Adds rows, at most `room`; their locations."""
        segment = self.segment
        first = segment.shape.num_rows
        part = slice(first, first + len(keys))
        locations = segment.locations(np.arange(part.start, part.stop))
        assert segment.keys is not None and segment.rows is not None
        segment.keys[part] = keys
        segment.rows[part] = rows
        segment.crcs[part] = row_checksums(rows, locations)
        if segment.stamps is not None:
            assert stamps is not None
            segment.stamps[part] = stamps
        # Last: from here on others may read them.
        segment.shape = SegmentShape(part.stop, rows.shape[1], segment.shape.moved)
        return locations

    def seal(self) -> Segment:
        """The segment, as large as it became."""
        segment, stop = self.segment, self.segment.shape.num_rows
        assert segment.keys is not None
        segment.keys = segment.keys[:stop]
        segment.stamps = None if segment.stamps is None else segment.stamps[:stop]
        # Views, not copies: somebody may be releasing rows.
        segment.crcs = segment.crcs[:stop]
        segment.released = segment.released[:stop]
        segment.__post_init__()
        return segment


class Appender:
    """Cuts a stream of rows into segments; one user at a time."""

    def __init__(self, begin: Callable[[], Filling], sealed: Callable[[Segment], None]) -> None:
        """Makes no segment yet.

        Args:
            begin: makes one that is known to readers.
            sealed: is given each full one.
        """
        self._begin, self._sealed = begin, sealed
        self._filling: Filling | None = None

    def add(self, keys: Uint64s, rows: Bytes, stamps: Int64s | None, out: Int64s) -> None:
        """Adds rows ``[n, row_bytes]``; ``out`` [n] gets their locations as they are given."""
        start = 0
        while start < len(keys):
            if self._filling is None:
                self._filling = self._begin()
            part = slice(start, start + min(self._filling.room, len(keys) - start))
            out[part] = self._filling.add(
                keys[part], rows[part], None if stamps is None else stamps[part]
            )
            start = part.stop
            if not self._filling.room:
                self.seal()

    def seal(self) -> None:
        """Ends the segment that has room, if there is one."""
        filling, self._filling = self._filling, None
        if filling is not None:
            self._sealed(filling.seal())
