# SPDX-License-Identifier: Apache-2.0
"""What goes into one save of a run, and the folder it goes to."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from jaxsparse.ckpt.checkpoint import Snapshot, write_state
from jaxsparse.ckpt.durable import free_bytes, locked, remove_temporary
from jaxsparse.ckpt.errors import SaveError
from jaxsparse.ckpt.host_state import HostState
from jaxsparse.ckpt.processes import is_writer
from jaxsparse.durable import make_folder

Snapshots = dict[str, Snapshot]
"""The state of a save under the name "", and further ones."""

OTHERS = "states"
"""Folder of a save that holds further states, such as the best one."""


def write_save(folder: Path, snapshots: Snapshots, host: HostState, notes: dict[str, Any]) -> None:
    """Writes this process's part of a save, its manifest last."""
    others = [name for name in snapshots if name]
    for name in others:
        inner = folder / OTHERS / name
        inner.mkdir(parents=True, exist_ok=True)
        write_state(inner, snapshots[name])
    if is_writer(snapshots[""].emb.mesh):
        host.write(folder)
    write_state(folder, snapshots[""], others=others, **notes)


def make_room(folder: Path, needed: int, lock: contextlib.ExitStack) -> None:
    """Locks the folder, clears away what killed saves left, and looks at the space."""
    make_folder(folder)
    lock.enter_context(locked(folder))
    remove_temporary(folder)
    free = free_bytes(folder)
    if free < needed:
        raise SaveError(f"it needs {needed:,} bytes and {free:,} are free")


def link(name: Path, target: str) -> None:
    """Makes a link, or lets it point elsewhere, at once; file systems without links have none."""
    temporary = name.with_name(f"{name.name}.new")
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        os.replace(temporary, name)
