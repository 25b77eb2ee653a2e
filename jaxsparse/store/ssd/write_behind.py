# SPDX-License-Identifier: Apache-2.0
"""Writes segments on threads, a bounded number at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxsparse.store.ssd.segment import Segment

IN_FLIGHT = 6
"""Segments being written: one or two leave the disk idle between them, and each holds memory."""


class WriteBehind:
    """Segments on their way to the disk; their rows stay in memory until they are there."""

    def __init__(self, write: Callable[[Segment], None]) -> None:
        """Starts no thread yet.

        Args:
            write: writes one and returns when it is on the disk.
        """
        self._write = write
        self._threads = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="jaxsparse-ssd-write")
        self._room = threading.Semaphore(IN_FLIGHT)
        self._lock = threading.Lock()
        self._retry = threading.Lock()
        self._failed: dict[int, tuple[Segment, Exception]] = {}
        self.wait_s = 0.0

    def submit(self, segment: Segment) -> None:
        """Begins to write a segment, when there is room."""
        start = time.perf_counter()
        self._room.acquire()
        self.wait_s += time.perf_counter() - start
        segment.written = self._threads.submit(self._run, segment)

    def _run(self, segment: Segment) -> None:
        try:
            self._write(segment)
            # Whoever read `rows` before keeps them; whoever reads it after finds the file.
            segment.rows = segment.memory = None
            segment.keys = None
            segment.stamps = None
        except Exception as error:
            with self._lock:
                self._failed[segment.number] = segment, error
        finally:
            self._room.release()

    def check(self) -> None:
        """Tries again what failed.

        Raises:
            StoreError: it fails again.
        """
        with self._retry:
            with self._lock:
                failed, self._failed = self._failed, {}
            for segment, _ in failed.values():
                self.submit(segment)
            self._settle([segment for segment, _ in failed.values()])

    def wait(self, segments: Sequence[Segment]) -> None:
        """Waits until segments are on the disk.

        Raises:
            StoreError: one cannot be written; its rows stay in memory.
        """
        for segment in segments:
            _ended(segment)
        with self._retry:  # not in the middle of a second attempt
            self._settle(segments)

    def _settle(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            _ended(segment)
            if segment.rows is not None:
                raise self._failed[segment.number][1]

    def forget(self, segments: Sequence[Segment]) -> None:
        """Gives up segments: after this nobody writes them."""
        with self._retry:
            for segment in segments:
                _ended(segment)
                with self._lock:
                    self._failed.pop(segment.number, None)

    def close(self) -> None:
        """Ends the threads, after what is under way."""
        self._threads.shutdown()


def _ended(segment: Segment) -> None:
    assert segment.written is not None
    segment.written.result()
