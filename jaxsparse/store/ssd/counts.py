# SPDX-License-Identifier: Apache-2.0
"""Numbers of a store since it was opened."""

from __future__ import annotations

import threading

NAMES = (
    "appended_rows",
    "reads",
    "read_rows",
    "read_us",
    "scattered_rows",
    "dense_rows",
    "flushes",
    "compactions",
    "compacted_rows",
)
"""Rows are those asked for; ``read_us`` are microseconds in reads, those of several threads added.
"""


class Counts:
    """Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(NAMES, 0)

    def add(self, **more: int) -> None:
        """Adds to the counts of these names."""
        with self._lock:
            for name, count in more.items():
                self._counts[name] += count

    def now(self) -> dict[str, int]:
        """A copy."""
        with self._lock:
            return dict(self._counts)
