# SPDX-License-Identifier: Apache-2.0
"""Folders of a command of its own on the disks of a run's tables.

What rows lie there is of no use to another command: a save holds all of them. So several commands
on one run, and several runs of one file, do not come in each other's way, and when a command ends
its folders go. Those of one that was killed go when the next one starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxsparse.cli.resolve import make_collection, make_trainer
from jaxsparse.cli.run_config import RunConfig
from jaxsparse.config import ConfigError
from jaxsparse.train import Trainer

PREFIX = "jaxsparse-rows-"
LOCK = "in_use"


@contextlib.contextmanager
def open_trainer(config: RunConfig, num_devices: int | None = None) -> Iterator[Trainer]:
    """Model and tables of a resolved run, whose rows may use its disks until this ends.

    Args:
        config: resolved.
        num_devices: as of `make_collection`.

    Raises:
        ConfigError: a folder on a disk cannot be made.
    """
    with contextlib.ExitStack() as stack:
        on_disks = stack.enter_context(row_disks(config))
        trainer = make_trainer(config, make_collection(on_disks, num_devices))
        # Before the folders go.
        stack.callback(_close_store, trainer)
        yield trainer


def _close_store(trainer: Trainer) -> None:
    if trainer.store is not None:
        trainer.store.close()


@contextlib.contextmanager
def row_disks(config: RunConfig) -> Iterator[RunConfig]:
    """The run with new folders below those that its tables name; they are deleted at the end."""
    tables = {}
    with contextlib.ExitStack() as stack:
        folders: dict[str, str] = {}
        for name, section in config.tables.items():
            tiers = section.tiers
            for disk in () if tiers is None else tiers.ssd:
                if disk not in folders:
                    folders[str(disk)] = stack.enter_context(_own_folder(Path(disk)))
            if tiers is not None:
                own = tuple(folders[str(disk)] for disk in tiers.ssd)
                section = dataclasses.replace(section, tiers=dataclasses.replace(tiers, ssd=own))
            tables[name] = section
        yield dataclasses.replace(config, tables=tables)


@contextlib.contextmanager
def _own_folder(disk: Path) -> Iterator[str]:
    try:
        disk.mkdir(parents=True, exist_ok=True)
        _delete_unused(disk)
        # It gets its name once it is locked, so that nobody takes it for one left behind.
        folder = Path(tempfile.mkdtemp(prefix="new-", dir=disk))
        lock = _lock(folder)
        folder = folder.rename(disk / f"{PREFIX}{folder.name.removeprefix('new-')}")
    except OSError as error:
        raise ConfigError(f"{disk}: cannot be used for rows: {error.strerror}") from error
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _delete_unused(disk: Path) -> None:
    """Deletes the folders of commands that were killed."""
    for folder in disk.glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # its command ends just now
            lock = _lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """A lock that is held as long as this process lives; None where another one has it."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
