# SPDX-License-Identifier: Apache-2.0
"""The segments in use: who reads them, which of their rows were released, what is not durable."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from jaxsparse.store.ssd.checksums import Int64s
from jaxsparse.store.ssd.errors import UnknownLocationError
from jaxsparse.store.ssd.journal import DROPPED, RELEASED, Record, locations_record
from jaxsparse.store.ssd.layout import ROW_BITS
from jaxsparse.store.ssd.recovery import by_segment, entries_record, snapshot_records
from jaxsparse.store.ssd.segment import Segment
from jaxsparse.store.ssd.wanted import Wanted

Bools = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Cut:
    """What happened since the last commit, all of it or none."""

    new: list[Segment]
    released: list[Int64s]
    snapshot: list[Record] | None
    """Of all there is at this moment, where one was asked for."""


class Segments:
    """By number. Any thread may call any method."""

    def __init__(self, table: str, found: Iterable[Segment], next_number: int) -> None:
        self.table = table
        self.next_number = next_number
        self._lock = threading.Condition()
        self._all = {segment.number: segment for segment in found}
        self._new: list[Segment] = []
        self._released: list[Int64s] = []

    def take_number(self) -> int:
        """The number of the next segment."""
        with self._lock:
            self.next_number += 1
            return self.next_number - 1

    def add(self, segment: Segment) -> None:
        """A segment of rows that are appended; part of the next cut."""
        with self._lock:
            self._all[segment.number] = segment
            self._new.append(segment)

    def all(self) -> list[Segment]:
        """In the order of their numbers."""
        with self._lock:
            return [self._all[number] for number in sorted(self._all)]

    def durable(self) -> list[Segment]:
        """Those of the last commit."""
        with self._lock:
            new = {segment.number for segment in self._new}
            return [self._all[number] for number in sorted(self._all) if number not in new]

    def pin(self, locations: Int64s) -> list[Wanted]:
        """Keeps what is asked for readable until `unpin`.

        Raises:
            UnknownLocationError: a location was never given out, or was released.
        """
        order = np.argsort(locations)
        ordered = locations[order]
        wanted = []
        with self._lock:
            for segment, part, _ in self._find(ordered):
                wanted.append(Wanted(segment, ordered[part], order[part], segment.rows))
                segment.readers += 1
        return wanted

    def unpin(self, wanted: Iterable[Wanted]) -> None:
        """Ends a read."""
        with self._lock:
            for one in wanted:
                one.segment.readers -= 1
            self._lock.notify_all()

    def _find(self, locations: Int64s) -> list[tuple[Segment, slice, Int64s]]:
        found = []
        for number, part, rows in by_segment(locations):
            segment = self._all.get(number)
            if segment is None or rows[-1] >= segment.shape.num_rows:
                raise self._unknown(number, int(rows[-1]), "was never given out, or is of before a")
            if segment.num_released and np.count_nonzero(segment.released[rows]):
                row = int(rows[np.argmax(segment.released[rows])])
                raise self._unknown(number, row, "was released, maybe before a")
            found.append((segment, part, rows))
        return found

    def _unknown(self, number: int, row: int, why: str) -> UnknownLocationError:
        return UnknownLocationError(
            f"table {self.table!r}: location {number << ROW_BITS | row} (segment {number}, row "
            f"{row}) {why} compaction; use what `append`, `entries` and `compact` return"
        )

    def release(self, locations: Int64s) -> None:
        """Makes rows garbage; durable with the next cut.

        Raises:
            UnknownLocationError: a location was never given out, was released, or comes twice;
                nothing is released.
        """
        ordered = np.sort(locations)
        twice = np.flatnonzero(ordered[1:] == ordered[:-1])
        with self._lock:
            found = self._find(ordered)
            if twice.size:
                location = int(ordered[twice[0]])
                raise UnknownLocationError(
                    f"table {self.table!r}: location {location} is released twice in one call"
                )
            for segment, _, rows in found:
                segment.released[rows] = True
                segment.num_released += rows.size
            if ordered.size:
                self._released.append(ordered)

    def cut(self, added: Sequence[Segment], dropped: Sequence[Segment], snapshot: bool) -> Cut:
        """Takes what is not durable, to be committed.

        Args:
            added: by compaction; they are in the snapshot.
            dropped: by compaction; they are not.
            snapshot: whether one is made.
        """
        with self._lock:
            without = {segment.number for segment in dropped}
            kept = [s for s in (*self._all.values(), *added) if s.number not in without]
            kept.sort(key=lambda segment: segment.number)
            cut = Cut(self._new, self._released, snapshot_records(kept) if snapshot else None)
            self._new, self._released = [], []
        return cut

    def undo(self, cut: Cut) -> None:
        """Gives back a cut whose commit failed."""
        with self._lock:
            self._new[:0] = cut.new
            self._released[:0] = cut.released

    def replace(self, old: Sequence[Segment], new: Sequence[Segment], sources: Int64s) -> Bools:
        """Puts compacted segments in the place of old ones, and waits for readers of these.

        Args:
            old: no longer known afterwards.
            new: their rows, in the order of ``sources``.
            sources: ``[n]``: where each row lay.

        Returns:
            ``[n]`` bool: rows that were not released meanwhile; the others are released now.
        """
        with self._lock:
            released = np.zeros(len(sources), np.bool_)
            for segment in old:
                mine = np.flatnonzero(sources >> ROW_BITS == segment.number)
                released[mine] = segment.released[sources[mine] & ((1 << ROW_BITS) - 1)]
                del self._all[segment.number]
            self._all.update((segment.number, segment) for segment in new)
            while any(segment.readers for segment in old):
                self._lock.wait()
        places = locations_of(new)
        if released.any():
            self.release(places[released])
        return ~released

    def records(
        self, cut: Cut, added: Sequence[Segment], dropped: Sequence[Segment]
    ) -> list[Record]:
        """What the log is told of a cut."""
        records = []
        if cut.new or added:
            records.append(entries_record([*cut.new, *added]))
        records += [locations_record(RELEASED, locations) for locations in cut.released]
        if dropped:
            numbers = np.array([segment.number for segment in dropped], np.int64)
            records.append(locations_record(DROPPED, numbers))
        return records


def locations_of(segments: Sequence[Segment]) -> Int64s:
    """All rows of segments, one segment after another."""
    parts = [s.locations(np.arange(s.shape.num_rows)) for s in segments]
    return np.concatenate([np.empty(0, np.int64), *parts])
