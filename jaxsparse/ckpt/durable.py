# SPDX-License-Identifier: Apache-2.0
"""Folders that appear whole or not at all, and survive a loss of power once they have a name."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxsparse.ckpt.errors import SaveError
from jaxsparse.durable import fault_point, sync

FAULT_POINTS = ("in_arrays", "before_manifest", "before_rename", "after_rename", "in_delete")

LOCK = ".lock"

THREADS = 8


def publish(temporary: Path, final: Path) -> None:
    """Gives a finished folder its name.

    All files and folders in it reach the disk before the name does, and the name before this
    returns: after a crash at any moment ``final`` is complete or not there.
    """
    _sync_tree(temporary)
    fault_point("before_rename")
    os.rename(temporary, final)
    fault_point("after_rename")
    sync(final.parent)


def _sync_tree(folder: Path) -> None:
    paths = [Path(parent, name) for parent, _, files in os.walk(folder) for name in [*files, "."]]
    # Side by side: each waits for the disk's journal, and they can wait together.
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(sync, paths):
            pass


def remove(path: Path) -> None:
    """Deletes a folder; half deleted, it no longer has its name."""
    doomed = path.with_name(f"{path.name}.del-{os.getpid()}")
    os.rename(path, doomed)
    fault_point("in_delete")
    remove_tree(doomed)


def remove_tree(folder: Path) -> None:
    """Deletes a folder, many files at a time: disks that discard at once take ms for each."""
    files = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    with ThreadPoolExecutor(THREADS) as threads, contextlib.suppress(OSError):
        list(threads.map(os.unlink, files))
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from saving in ``folder``; a dead process holds no lock.

    Raises:
        SaveError: another one is saving there.
    """
    with open(folder / LOCK, "a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise SaveError(
                f"{folder}: process {file.read() or 'unknown'} is saving there; "
                "give every run a folder of its own"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def remove_temporary(folder: Path) -> None:
    """Deletes what saves that were killed have left; nobody may be saving there."""
    for path in folder.iterdir():
        if path.is_dir() and (".tmp" in path.suffixes or ".del-" in path.name):
            remove_tree(path)


def free_bytes(folder: Path) -> int:
    """Bytes that can be written there."""
    info = os.statvfs(folder)
    return info.f_bavail * info.f_frsize
