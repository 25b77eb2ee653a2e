# SPDX-License-Identifier: Apache-2.0
"""Names and contents that survive a loss of power, and points at which tests end the process."""

from __future__ import annotations

import collections
import os
import signal
from pathlib import Path

FAULT = "JAXSPARSE_FAULT"
"""Environment variable for tests: ``<point>`` or ``<point>:<n>`` kills the process with SIGKILL
when it passes that point for the n-th time (default the first)."""

_passed: collections.Counter[str] = collections.Counter()


def fault_point(name: str) -> None:
    """Dies here if the environment says so."""
    _passed[name] += 1
    wanted, _, count = os.environ.get(FAULT, "").partition(":")
    if wanted == name and _passed[name] == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)


def sync(path: Path) -> None:
    """Waits until a file or the entries of a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Makes a folder and those above it, each entered on the disk in its parent."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)
