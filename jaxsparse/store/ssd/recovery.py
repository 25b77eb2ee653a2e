# SPDX-License-Identifier: Apache-2.0
"""The segments of a store that is opened: from the journal, and from the segments' own columns."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxsparse.store.ssd.checksums import Int64s
from jaxsparse.store.ssd.files import SegmentFiles
from jaxsparse.store.ssd.journal import BITS, DROPPED, ENTRY, RELEASED, SEGMENTS, Record
from jaxsparse.store.ssd.layout import ROW_BITS, ROW_MASK, SegmentShape, Uint64s
from jaxsparse.store.ssd.segment import Segment, segment_name

IN_FLIGHT = 32
"""Segments whose columns are being read."""

_FILE = re.compile(r"segment-\d{12}")


def by_segment(locations: Int64s) -> Iterator[tuple[int, slice, Int64s]]:
    """Of each segment its number, which of ``locations``, that ascend, are in it, and the numbers
    of these rows."""
    if not locations.size:
        return
    numbers = locations >> ROW_BITS
    cuts = (np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()
    rows, begins = locations & ROW_MASK, [0, *cuts]
    # A pass asks for rows of hundreds of segments: slices of one array, not an array of each.
    for number, begin, end in zip(
        numbers[begins].tolist(), begins, [*cuts, locations.size], strict=True
    ):
        part = slice(begin, end)
        yield number, part, rows[part]


def snapshot_records(segments: Sequence[Segment]) -> list[Record]:
    """All that `replay` needs."""
    bits = b"".join(np.packbits(segment.released).tobytes() for segment in segments)
    return [entries_record(segments), (BITS, bits)]


def entries_record(segments: Sequence[Segment]) -> Record:
    """Tells of new segments."""
    rows = [(s.number, s.folder, s.shape.num_rows, int(s.shape.moved)) for s in segments]
    return SEGMENTS, np.array(rows, ENTRY).tobytes()


def replay(records: Iterable[Record], folders: Sequence[Path], row_bytes: int) -> list[Segment]:
    """Segments in the order of their numbers, their checksums not read yet."""
    found: dict[int, Segment] = {}
    for kind, payload in records:
        if kind == SEGMENTS:
            for number, folder, num_rows, moved in np.frombuffer(payload, ENTRY).tolist():
                shape = SegmentShape(num_rows, row_bytes, bool(moved))
                path = folders[folder] / segment_name(number)
                released = np.zeros(num_rows, np.bool_)
                crcs = np.empty(0, np.uint32)
                found[number] = Segment(number, folder, shape, path, crcs, released)
        elif kind == BITS:
            at = 0
            for segment in found.values():
                size = -(-segment.shape.num_rows // 8)
                bits = np.frombuffer(payload, np.uint8, size, at)
                count = segment.shape.num_rows
                segment.released[:] = np.unpackbits(bits, count=count).view(np.bool_)
                at += size
        elif kind == RELEASED:
            for number, _, rows in by_segment(np.sort(np.frombuffer(payload, "<i8"))):
                if number in found:  # not one that compaction dropped meanwhile
                    found[number].released[rows] = True
        elif kind == DROPPED:
            for number in np.frombuffer(payload, "<i8").tolist():
                del found[number]
    for segment in found.values():
        segment.num_released = int(np.count_nonzero(segment.released))
    return [found[number] for number in sorted(found)]


def load_columns(files: SegmentFiles, segments: Sequence[Segment]) -> None:
    """Gives segments their keys and checksums.

    Raises:
        DamagedSegmentError: a file is missing, cut or changed.
    """
    reads: deque[tuple[Segment, Any]] = deque()

    def finish() -> None:
        segment, future = reads.popleft()
        columns = files.finish_columns(segment, future)
        segment.keys, segment.crcs = columns.keys.copy(), columns.crcs.copy()
        segment.__post_init__()

    for segment in segments:
        files.check_size(segment)
        if len(reads) == IN_FLIGHT:
            finish()
        reads.append((segment, files.start_read(segment, 0, segment.shape.columns_bytes)))
    while reads:
        finish()


def remove_leftovers(folders: Sequence[Path], segments: Iterable[Segment]) -> None:
    """Deletes segments that a crash left: not in the journal, or half written."""
    known = {segment.path for segment in segments}
    for folder in folders:
        for path in folder.iterdir():
            if _FILE.fullmatch(path.name) and path not in known:
                path.unlink()


def live_entries(files: SegmentFiles, segments: Sequence[Segment]) -> tuple[Uint64s, Int64s]:
    """Keys and locations of all rows that were not released, repeated keys included."""
    keys, locations = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for segment in segments:
        found = segment.keys  # once: a write that ends takes them away
        if found is None:
            columns_bytes = segment.shape.columns_bytes
            future = files.start_read(segment, 0, columns_bytes)
            found = files.finish_columns(segment, future).keys
        rows = np.flatnonzero(~segment.released[: segment.shape.num_rows])
        keys.append(found[rows])
        locations.append(segment.locations(rows))
    return np.concatenate(keys), np.concatenate(locations)


def superseded(
    files: SegmentFiles, segments: Sequence[Segment], keys: Uint64s, locations: Int64s
) -> Int64s:
    """Places in ``keys`` of rows that were appended again later and never released.

    A crash between the two leaves such; they are few.
    """
    ordered = np.sort(keys)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not repeated.size:
        return np.empty(0, np.int64)
    places = np.flatnonzero(np.isin(keys, repeated))
    stamps = locations[places].copy()
    moved = {segment.number: segment for segment in segments if segment.shape.moved}
    for number in np.unique(stamps >> ROW_BITS).tolist():
        if number in moved:
            segment = moved[number]
            found = segment.stamps
            if found is None:
                future = files.start_read(segment, 0, segment.shape.columns_bytes)
                found = files.finish_columns(segment, future).stamps
            assert found is not None
            mine = np.flatnonzero(locations[places] >> ROW_BITS == number)
            stamps[mine] = found[locations[places[mine]] & ROW_MASK]
    order = np.lexsort((stamps, keys[places]))
    older = keys[places[order[:-1]]] == keys[places[order[1:]]]
    found_older: Int64s = places[order[:-1][older]]
    return found_older
