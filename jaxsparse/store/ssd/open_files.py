# SPDX-License-Identifier: Apache-2.0
"""Segment files kept open for scattered reads."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from jaxsparse.store.ssd.segment import Segment

MOST = 1024
"""Files kept open; fewer where the process may have few: a quarter of its limit."""


class OpenFiles:
    """Descriptors of segments, the last used ones kept."""

    def __init__(self, direct: bool) -> None:
        self._flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._direct = direct
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = MOST if limit == resource.RLIM_INFINITY else min(MOST, limit // 4)
        self._lock = threading.Lock()
        self._files: OrderedDict[int, list[int]] = OrderedDict()  # number -> [descriptor, users]

    @contextlib.contextmanager
    def borrow(
        self, segments: Sequence[Segment], damaged: Callable[[Segment, str], Exception]
    ) -> Iterator[list[int]]:
        """Descriptors of segments, open while the block runs.

        Args:
            segments: different ones.
            damaged: the error for one that cannot be opened.
        """
        found: list[int] = []
        held: list[list[int]] = []
        try:
            with self._lock:
                for segment in segments:
                    entry = self._files.get(segment.number)
                    if entry is None:
                        entry = [self._open(segment, damaged), 0]
                        self._files[segment.number] = entry
                    else:
                        self._files.move_to_end(segment.number)
                    entry[1] += 1
                    held.append(entry)
                    found.append(entry[0])
            yield found
        finally:
            with self._lock:
                for entry in held:
                    entry[1] -= 1
                self._close_oldest()

    def _open(self, segment: Segment, damaged: Callable[[Segment, str], Exception]) -> int:
        try:
            descriptor = os.open(segment.path, self._flags)
        except OSError as error:
            raise damaged(segment, error.strerror or str(error)) from error
        if not self._direct:  # a row is wanted, not the megabytes behind it
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor

    def _close_oldest(self) -> None:
        spare = len(self._files) - self._most
        if spare <= 0:
            return
        idle = [number for number, (_, users) in self._files.items() if not users]
        for number in idle[:spare]:
            os.close(self._files.pop(number)[0])

    def forget(self, segment: Segment) -> None:
        """Closes a segment that nobody reads."""
        with self._lock:
            entry = self._files.pop(segment.number, None)
        if entry is not None:
            os.close(entry[0])

    def close(self) -> None:
        """Closes all."""
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1][0])
