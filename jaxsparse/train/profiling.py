# SPDX-License-Identifier: Apache-2.0
"""A trace of some steps of a run, by jax's profiler."""

from __future__ import annotations

from pathlib import Path

import jax


class ProfileSteps:
    """Traces the steps that take a run from one global step to another.

    >>> ProfileSteps(10, 20, "runs/a/profile").told
    'no profile: the run came to no step between 10 and 20'
    """

    def __init__(self, start: int, stop: int, folder: str | Path) -> None:
        """Traces nothing yet.

        Args:
            start: the first step traced is the one behind so many updates, counted from the
                run's first step, also where it was resumed; >= 0.
            stop: updates after which the trace ends; > ``start``.
            folder: where it is written, in a folder by date and time.

        Raises:
            ValueError: no step lies between the two.
        """
        if not 0 <= start < stop:
            raise ValueError(f"ProfileSteps: expected 0 <= start < stop, got {start} and {stop}")
        self.start, self.stop, self.folder = start, stop, Path(folder)
        self._running = False
        self._begun: int | None = None
        self._ended = 0

    @property
    def told(self) -> str:
        """What was traced, for people."""
        if self._begun is None:
            return f"no profile: the run came to no step between {self.start} and {self.stop}"
        return (
            f"profile of steps {self._begun} to {self._ended} in {self.folder}: open its "
            "perfetto_trace.json.gz at https://ui.perfetto.dev, or run `xprof` on the folder"
        )

    def at(self, step: int) -> None:
        """Begins or ends the trace, if its time has come; no step is under way.

        Args:
            step: updates made so far.
        """
        if self._running:
            self._ended = step
            if step >= self.stop:
                self.close()
        elif self._begun is None and self.start <= step < self.stop:
            jax.profiler.start_trace(self.folder, create_perfetto_trace=True)
            self._running, self._begun = True, step

    def close(self) -> None:
        """Ends a trace that is running, such as one of a run that stops earlier."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
