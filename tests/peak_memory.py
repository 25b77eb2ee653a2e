# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a Python program, compared between a small and a large input."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TELL_PEAK = """
from pathlib import Path
# Of this process alone: getrusage would tell of its parent's.
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""
"""Ends a program: prints its peak in KiB."""

ROUNDS = 4
"""Threads and allocators add up to 8 % by chance to a peak; nothing takes any away."""

ROOT = Path(__file__).parents[1]


def assert_peaks_are_equal(
    program: str,
    small: Sequence[str],
    large: Sequence[str],
    *,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
) -> None:
    """The least peak of a few runs does not grow by more than 5 %.

    Args:
        program: Python; what it prints last, but for its peak, must be "ok".
        small: its arguments for the small input.
        large: for the large one.
        cwd: where it runs.
        env: its environment.
    """
    peaks: tuple[list[int], list[int]] = ([], [])
    for _ in range(ROUNDS):
        for arguments, told in zip((small, large), peaks, strict=True):
            done = subprocess.run(
                [sys.executable, "-c", program + TELL_PEAK, *arguments],
                cwd=cwd,
                env=None if env is None else dict(env),
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr[-4000:]
            *_, ok, peak = done.stdout.splitlines()
            assert ok == "ok"
            told.append(int(peak))
        if min(peaks[1]) <= 1.05 * min(peaks[0]):
            return
    raise AssertionError(f"KiB of {ROUNDS} runs each, small and large: {peaks}")
