# SPDX-License-Identifier: Apache-2.0
"""SegmentStore: rows of one table on disks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.durable import fault_point, sync
from jaxsparse.store.ssd.checksums import Bytes, Int64s
from jaxsparse.store.ssd.compaction import Rewriting, choose, remove
from jaxsparse.store.ssd.counts import Counts
from jaxsparse.store.ssd.errors import StoreError
from jaxsparse.store.ssd.files import SegmentFiles
from jaxsparse.store.ssd.filling import Appender, Filling
from jaxsparse.store.ssd.folders import Folders
from jaxsparse.store.ssd.layout import SEGMENT_BYTES, Uint64s, rows_per_segment
from jaxsparse.store.ssd.opening import check_arguments, check_direct, open_journal, recover
from jaxsparse.store.ssd.recovery import live_entries, superseded
from jaxsparse.store.ssd.row_reader import RowReader
from jaxsparse.store.ssd.scattered import Implementation
from jaxsparse.store.ssd.segment import Segment
from jaxsparse.store.ssd.segments import locations_of
from jaxsparse.store.ssd.wanted import Wanted
from jaxsparse.store.ssd.write_behind import WriteBehind

READ_AHEAD_THREADS = 2
READS_AHEAD = 8
"""Asked for and not yet done; `SegmentStore.read_ahead` waits beyond."""


class SegmentStore:
    """Rows of one table on disks: appended, read by location, released.

    Rows lie in immutable segments, one file each, spread over the folders in turn. A row can be
    read as soon as it was appended; it is durable after `flush`, and after a crash the store is as
    of the last flush. Several threads may call anything at once, but `compact` moves rows: whoever
    keeps locations has to take up the new ones before using them again.

    >>> import tempfile
    >>> store = SegmentStore([Path(tempfile.mkdtemp())], table="item", row_bytes=4)
    >>> at = store.append(np.array([7, 9], np.uint64), np.arange(8, dtype=np.uint8).reshape(2, 4))
    >>> store.read(at[[1]]).tolist()
    [[4, 5, 6, 7]]
    >>> store.close()
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        table: str,
        row_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
        direct: bool = False,
        implementation: Implementation | None = None,
    ) -> None:
        """Opens the store in ``folders``, or makes it there.

        Args:
            folders: different ones, best on different disks; the same and in the same order each
                time. No other store may use them.
            table: its name.
            row_bytes: bytes of a row.
            segment_bytes: most bytes of a new segment; 8 to 16 MB run at the disk's speed.
            direct: read past the page cache.
            implementation: reads scattered rows; None takes the fastest there is.

        Raises:
            LockedError: another process has the store; names it.
            MismatchError: other folders, table or row_bytes than it was made with.
            DamagedJournalError: its manifest or log is damaged.
            DamagedSegmentError: a segment is missing or damaged.
            ValueError: an argument is out of range.
        """
        check_arguments(row_bytes, segment_bytes)
        self.table, self.row_bytes, self.direct = table, row_bytes, direct
        self._capacity = rows_per_segment(segment_bytes, row_bytes)
        self._folders = Folders(folders, table)
        try:
            if direct:
                check_direct(self._folders.paths, table)
            self._journal = open_journal(self._folders, table, row_bytes)
            paths = self._folders.paths
            self._files = SegmentFiles(paths, table, self._folders.store, direct)
            self._segments = recover(self._journal, self._folders, self._files)
            self._counts = Counts()
            self._rows = RowReader(self._files, row_bytes, direct, implementation, self._counts)
        except BaseException:
            self._folders.close()
            raise
        self._writes = WriteBehind(self._files.write)
        self._appender = Appender(lambda: self._begin(moved=False), self._writes.submit)
        self._append_lock, self._commit_lock = threading.Lock(), threading.Lock()
        self._ahead = ThreadPoolExecutor(READ_AHEAD_THREADS, "jaxsparse-ssd-ahead")
        self._ahead_room = threading.Semaphore(READS_AHEAD)
        self._is_closed = False

    @property
    def implementation(self) -> Implementation:
        """What reads scattered rows."""
        return self._rows.implementation

    def append(self, keys: npt.NDArray[Any], rows: Bytes) -> Int64s:
        """Adds rows; of several rows of a key the newest counts when the store is reopened.

        Release older rows after this, not before: a flush in between would leave neither.

        Args:
            keys: ``[n]`` uint64, or int64 for the same bits.
            rows: ``[n, row_bytes]`` uint8.

        Returns:
            ``[n]`` int64 locations.

        Raises:
            NoSpaceError: a disk is full. These rows are not taken, all older ones stay readable.
            StoreError: a segment cannot be written for another reason.
        """
        self._check_open()
        keys = np.ascontiguousarray(keys)
        rows = np.ascontiguousarray(rows)
        if keys.ndim != 1 or keys.dtype not in (np.uint64, np.int64):
            raise ValueError(
                f"keys must be [n] uint64 or int64, got {list(keys.shape)} {keys.dtype}"
            )
        if rows.shape != (len(keys), self.row_bytes) or rows.dtype != np.uint8:
            raise ValueError(
                f"rows must be [{len(keys)}, {self.row_bytes}] uint8, got {list(rows.shape)} "
                f"{rows.dtype}; view other types as bytes"
            )
        locations = np.full(len(keys), -1, np.int64)
        with self._append_lock:
            self._writes.check()
            try:
                self._appender.add(keys.view(np.uint64), rows, None, locations)
                self._writes.check()
            except BaseException:
                self._segments.release(locations[locations >= 0])
                raise
        self._counts.add(appended_rows=len(keys))
        return locations

    def _begin(self, moved: bool) -> Filling:
        number = self._segments.take_number()
        folder = number % len(self._folders.paths)
        path = self._folders.paths[folder]
        filling = Filling(number, folder, path, self._capacity, self.row_bytes, moved)
        if not moved:
            self._segments.add(filling.segment)
        return filling

    def read(self, locations: npt.NDArray[Any]) -> Bytes:
        """Rows ``[n, row_bytes]`` uint8 at ``locations`` [n] int64: any order, repeats allowed.

        Raises:
            UnknownLocationError: a location was never given out, or was released.
            DamagedSegmentError: a row is not what was written; names table, segment and folder.
        """
        return self._read(self._pin(locations), len(locations))

    def read_ahead(self, locations: npt.NDArray[Any]) -> Future[Bytes]:
        """As `read`, on a thread. Its rows may be released, and moved, before it is done.

        Waits while `READS_AHEAD` of them are not done.
        """
        wanted = self._pin(locations)
        self._ahead_room.acquire()
        future = self._ahead.submit(self._read, wanted, len(locations))
        future.add_done_callback(lambda _: self._ahead_room.release())
        return future

    def _pin(self, locations: npt.NDArray[Any]) -> list[Wanted]:
        self._check_open()
        return self._segments.pin(_as_locations(locations))

    def _read(self, wanted: Sequence[Wanted], num_rows: int) -> Bytes:
        try:
            return self._rows.read(wanted, num_rows)
        finally:
            self._segments.unpin(wanted)

    def release(self, locations: npt.NDArray[Any]) -> None:
        """Makes rows garbage: not readable from now on, gone after the next flush.

        Raises:
            UnknownLocationError: one was never given out, was released, or comes twice; nothing is
                released.
        """
        self._check_open()
        self._segments.release(_as_locations(locations))

    def flush(self) -> None:
        """Makes all appends and releases durable.

        Raises:
            NoSpaceError: a disk is full; nothing appended is lost, flush again when there is room.
            StoreError: it cannot be written for another reason.
        """
        self._check_open()
        with self._commit_lock:
            self._commit([], [])

    def _commit(self, added: Sequence[Segment], dropped: Sequence[Segment]) -> None:
        """Data, folders, log, manifest: each on the disk before the next."""
        with self._append_lock:
            self._writes.check()
            self._appender.seal()
            cut = self._segments.cut(added, dropped, self._journal.is_long)
        records = self._segments.records(cut, added, dropped)
        if not records:
            return
        try:
            self._writes.wait([*cut.new, *added])
            for folder in sorted({segment.folder for segment in (*cut.new, *added)}):
                sync(self._folders.paths[folder])
            fault_point("ssd_before_log")
            if cut.snapshot is not None:
                self._journal.rotate(cut.snapshot, self._segments.next_number)
            else:
                self._journal.commit(records, self._segments.next_number)
        except BaseException:
            self._segments.undo(cut)
            raise
        self._counts.add(flushes=1)

    def compact(self, max_garbage: float = 0.5) -> tuple[Int64s, Int64s]:
        """Rewrites segments with more garbage than that and merges small ones; flushes.

        Rows may be read, appended and released meanwhile.

        Args:
            max_garbage: share of a segment's rows that may be released.

        Returns:
            Old and new locations ``[n]`` int64 of the rows that moved. The old ones are unknown
            from now on; reads asked for before are done.

        Raises:
            ValueError: ``max_garbage`` is out of range.
            NoSpaceError: a disk is full; nothing moved.
            DamagedSegmentError: a segment is damaged; nothing moved.
        """
        self._check_open()
        if not 0 <= max_garbage < 1:
            raise ValueError(f"max_garbage must be at least 0 and below 1, got {max_garbage}")
        with self._commit_lock:
            old = choose(self._segments.durable(), max_garbage, self._capacity)
            if not old:
                return np.empty(0, np.int64), np.empty(0, np.int64)
            rewriting = Rewriting(lambda: self._begin(moved=True), self._writes)
            try:
                sources = rewriting.run(old, self._files, self._rows.read_into)
                fault_point("ssd_in_compact")
                self._commit(rewriting.new, old)
            except BaseException:
                if self._journal.is_certain:  # else the manifest may name them
                    rewriting.discard()
                raise
            new = rewriting.new
            kept = self._segments.replace(old, new, sources)
            remove(old, self._rows.open_files)
        self._counts.add(compactions=1, compacted_rows=len(sources))
        return sources[kept], locations_of(new)[kept]

    def clear(self) -> None:
        """Releases all rows and removes their segments."""
        for segment in self._segments.all():
            self._segments.release(segment.locations(segment.live_rows()))
        self.flush()
        self.compact(0.0)

    def entries(self) -> tuple[Uint64s, Int64s]:
        """Keys ``[n]`` uint64 and locations ``[n]`` int64 of all rows that were not released.

        Of several rows of a key only the newest. Right after opening the keys are in memory; later
        calls read them from the segments.
        """
        self._check_open()
        segments = self._segments.all()
        keys, locations = live_entries(self._files, segments)
        older = superseded(self._files, segments, keys, locations)
        for segment in segments:
            if segment.rows is None:
                segment.keys = None
        return np.delete(keys, older), np.delete(locations, older)

    def rows(self) -> tuple[int, int]:
        """Rows that were not released, and garbage: those that were."""
        segments = self._segments.all()
        garbage = sum(segment.num_released for segment in segments)
        return sum(segment.shape.num_rows for segment in segments) - garbage, garbage

    def stats(self) -> dict[str, Any]:
        """Counts since opening, and what there is now; times in seconds."""
        segments = self._segments.all()
        live, garbage = self.rows()
        counts = self._counts.now()
        return {
            "implementation": self.implementation,
            "live_rows": live,
            "garbage_rows": garbage,
            "segments": len(segments),
            "disk_bytes": sum(s.shape.file_bytes for s in segments if s.rows is None),
            "memory_bytes": sum(_memory_bytes(segment) for segment in segments),
            "write_wait_s": self._writes.wait_s,
            "read_s": counts.pop("read_us") / 1e6,
            **counts,
        }

    def close(self) -> None:
        """Flushes, and lets other processes have the store. A second time does nothing.

        Raises:
            NoSpaceError: a disk is full: what was not flushed is lost, the rest can be opened.
        """
        if self._is_closed:
            return
        try:
            self.flush()
        finally:
            self._is_closed = True
            self._ahead.shutdown()
            self._writes.close()
            self._rows.close()
            self._folders.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"table {self.table!r}: the store is closed")


def _as_locations(locations: npt.NDArray[Any]) -> Int64s:
    array = np.asarray(locations)
    if array.ndim != 1 or array.dtype != np.int64:
        raise ValueError(f"locations must be [n] int64, got {list(array.shape)} {array.dtype}")
    return array


def _memory_bytes(segment: Segment) -> int:
    arrays = segment.crcs, segment.released, segment.keys, segment.stamps, segment.rows
    return sum(array.nbytes for array in arrays if array is not None)
