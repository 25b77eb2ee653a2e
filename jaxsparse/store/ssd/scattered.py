# SPDX-License-Identifier: Apache-2.0
"""Scattered rows of many segments: in C++ (`reader.cc`), or by ``os.preadv`` on threads."""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Protocol

import numpy as np

from jaxsparse.ops.native import library
from jaxsparse.store.ssd.checksums import Bytes
from jaxsparse.store.ssd.layout import ALIGNMENT, ROW_MASK
from jaxsparse.store.ssd.native import call
from jaxsparse.store.ssd.open_files import OpenFiles
from jaxsparse.store.ssd.segment import Segment
from jaxsparse.store.ssd.wanted import Span, Wanted, spans, take

Implementation = Literal["io_uring", "pread", "python"]

DEPTH = 128
"""Reads in flight of a ring: on a virtual disk a fifth more rows a second than 64, and at 256 no
more still."""
RINGS = 2
"""Reads of rows that run side by side."""
THREADS = 16
"""Of the reader in Python."""
GAP_BYTES, MOST_BYTES = 4096, 64 << 10
"""As in `reader.cc`."""
SHORT, DAMAGED = -1, -2

Damaged = Callable[[Segment, str], Exception]


class ScatteredReader(Protocol):
    """Reads rows that lie far apart."""

    implementation: Implementation

    def read(self, wanted: Sequence[Wanted], out: Bytes) -> None:
        """Reads rows of files into ``out``; raises what `Damaged` makes where one is not whole."""

    def close(self) -> None:
        """Frees what it holds; nobody reads any more."""


def open_reader(
    files: OpenFiles, damaged: Damaged, direct: bool, implementation: Implementation | None
) -> ScatteredReader:
    """The fastest reader there is here, or the one that is named.

    Raises:
        RuntimeError: the one named is not to be had; says why.
    """
    if implementation == "python" or (implementation is None and not library.is_available()):
        return PythonReader(files, damaged, direct)
    library.load()
    rings = [] if implementation == "pread" else _open_rings()
    if implementation == "io_uring" and not rings:
        raise RuntimeError("io_uring is not to be had: the kernel or a container's filter lacks it")
    return NativeReader(files, damaged, direct, rings)


def _open_rings() -> list[int]:
    rings = [call("jaxsparse_segment_reader", DEPTH) for _ in range(RINGS)]
    return [ring for ring in rings if ring]


class NativeReader:
    """`reader.cc`: through io_uring, or on its own threads."""

    def __init__(
        self, files: OpenFiles, damaged: Damaged, direct: bool, rings: Sequence[int]
    ) -> None:
        self.implementation: Implementation = "io_uring" if rings else "pread"
        self._files, self._damaged, self._direct = files, damaged, direct
        self._rings: queue.SimpleQueue[int] = queue.SimpleQueue()
        for ring in rings or [0] * RINGS:
            self._rings.put(ring)

    def read(self, wanted: Sequence[Wanted], out: Bytes) -> None:
        """See `ScatteredReader`."""
        segments = [one.segment for one in wanted]
        starts = np.cumsum([0, *(one.locations.size for one in wanted)])
        locations = np.concatenate([one.locations for one in wanted])
        targets = np.concatenate([one.targets for one in wanted])
        data = np.array([segment.data_offset for segment in segments], np.int64)
        crcs = np.array([segment.crc_address for segment in segments], np.int64)
        failed = np.empty(1, np.int64)
        with self._files.borrow(segments, self._damaged) as descriptors:
            ring = self._rings.get()
            try:
                wrong = call(
                    "jaxsparse_segment_read",
                    ring,
                    int(self._direct),
                    out.shape[1],
                    len(segments),
                    starts,
                    np.array(descriptors, np.int64),
                    data,
                    crcs,
                    locations,
                    targets,
                    out,
                    failed,
                )
            finally:
                self._rings.put(ring)
        if wrong:
            place = int(np.searchsorted(starts, failed[0], side="right")) - 1
            row = int(locations[failed[0]] & ROW_MASK)
            raise self._damaged(segments[place], _reason(wrong, row))

    def close(self) -> None:
        """See `ScatteredReader`."""
        while not self._rings.empty():
            ring = self._rings.get()
            if ring:
                call("jaxsparse_segment_reader_close", ring)


class PythonReader:
    """For where there is no compiler: a thread a read, thirty times the work for the CPU."""

    implementation: Implementation = "python"

    def __init__(self, files: OpenFiles, damaged: Damaged, direct: bool) -> None:
        self._files, self._damaged, self._direct = files, damaged, direct
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="jaxsparse-ssd-read")
        self._local = threading.local()

    def read(self, wanted: Sequence[Wanted], out: Bytes) -> None:
        """See `ScatteredReader`."""
        segments = [one.segment for one in wanted]
        with self._files.borrow(segments, self._damaged) as descriptors:
            reads = [
                self._threads.submit(self._read, descriptor, span, out)
                for descriptor, one in zip(descriptors, wanted, strict=True)
                for span in spans(one, GAP_BYTES, MOST_BYTES)
            ]
            errors = [error for read in reads if (error := read.exception())]
        if errors:
            raise errors[0]

    def _read(self, descriptor: int, span: Span, out: Bytes) -> None:
        align = ALIGNMENT if self._direct else 1
        begin = span.begin // align * align
        size = -(-(span.end - begin) // align) * align
        view = memoryview(self._buffer(size))[:size]
        got = 0
        while got < span.end - begin:
            try:
                more = os.preadv(descriptor, [view[got:]], begin + got)
            except OSError as error:
                raise self._damaged(span.wanted.segment, str(error.strerror)) from error
            if not more or (self._direct and got + more < span.end - begin):
                raise self._damaged(span.wanted.segment, _reason(SHORT, span.base))
            got += more
        bad = take(span, view[span.begin - begin :], out)
        if bad is not None:
            raise self._damaged(span.wanted.segment, _reason(DAMAGED, bad))

    def _buffer(self, size: int) -> mmap.mmap:
        """Of this thread; aligned as pages are."""
        buffer: mmap.mmap | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._local.buffer = mmap.mmap(-1, max(size, MOST_BYTES))
        return buffer

    def close(self) -> None:
        """See `ScatteredReader`."""
        self._threads.shutdown()


def _reason(wrong: int, row: int) -> str:
    if wrong == DAMAGED:
        return f"the checksum of row {row} differs"
    if wrong == SHORT:
        return f"it ends before row {row}"
    return os.strerror(wrong)
