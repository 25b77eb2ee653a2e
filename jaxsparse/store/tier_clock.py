# SPDX-License-Identifier: Apache-2.0
"""What a thread that works ahead was busy with while somebody waited for it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

TIERS = ("device", "ram", "ssd")
"""Where rows may lie, the nearest first."""

MOST_SPANS = 4096
"""Spans kept, far more than a pass has: an evaluation reads rows for long while nobody asks."""


class TierClock:
    """Spans of time by tier, of one thread; read while that thread rests.

    >>> clock = TierClock()
    >>> with clock.busy("ssd"):
    ...     pass
    >>> sorted(clock.waited(0.0, time.perf_counter())), clock.waited(0.0, 0.0)
    (['ssd'], {'ssd': 0.0})
    """

    def __init__(self) -> None:
        """Starts without a span."""
        self._spans: deque[tuple[str, float, float]] = deque(maxlen=MOST_SPANS)

    @contextlib.contextmanager
    def busy(self, tier: str) -> Iterator[None]:
        """Books the time inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spans.append((tier, start, time.perf_counter()))

    def waited(self, start: float, end: float) -> dict[str, float]:
        """Seconds of ``start .. end`` by tier that the thread was busy with."""
        waited: dict[str, float] = {}
        for tier, begun, done in self._spans:
            inside = max(0.0, min(end, done) - max(start, begun))
            waited[tier] = waited.get(tier, 0.0) + inside
        return waited

    def clear(self) -> None:
        """Forgets all spans."""
        self._spans.clear()
