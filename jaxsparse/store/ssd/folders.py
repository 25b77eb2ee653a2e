# SPDX-License-Identifier: Apache-2.0
"""The folders of a store: whose they are, and that one process has them at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from jaxsparse.durable import make_folder, sync
from jaxsparse.store.ssd.errors import (
    NO_SPACE,
    LockedError,
    MismatchError,
    NoSpaceError,
    UncertainError,
    os_code,
)

LOCK = "lock"
MANIFEST = "manifest.json"
MARK = "folder.json"
"""Says of which store a folder is, and which of its folders."""


class Folders:
    """The folders of one store, locked until `close`.

    Attributes:
        paths: of the folders, in their order.
        store: 16 bytes that no other store has.
    """

    def __init__(self, paths: Sequence[Path], table: str) -> None:
        """Makes the folders that are not there, locks all and reads their marks.

        Raises:
            LockedError: another process has one.
            MismatchError: they are not the folders of one store, in their order.
        """
        self.paths = [Path(path) for path in paths]
        if not self.paths or len(set(self.paths)) < len(self.paths):
            raise ValueError(f"folders must be different ones, at least one, got {self.paths}")
        self._locks: list[IO[bytes]] = []
        try:
            for path in self.paths:
                make_folder(path)
                self._locks.append(_lock(path, table))
            self.store = self._identity(table)
        except BaseException:
            self.close()
            raise

    def _identity(self, table: str) -> bytes:
        marks = [_read_mark(path, table) for path in self.paths]
        if not any(marks):
            if (self.paths[0] / MANIFEST).exists():
                raise MismatchError(
                    f"table {table!r}: {self.paths[0]} holds a store, but its {MARK} is missing; "
                    "put back a copy of it"
                )
            return self._mark(table)
        for number, (path, mark) in enumerate(zip(self.paths, marks, strict=True)):
            wanted = {"store": (marks[0] or {}).get("store"), "number": number}
            found = {key: (mark or {}).get(key) for key in wanted}
            if mark is None or found != wanted or mark["folders"] != len(self.paths):
                raise MismatchError(
                    f"table {table!r}: {path} is not folder {number} of {len(self.paths)} of the "
                    f"store in {self.paths[0]}: its {MARK} says {mark}; give the folders that the "
                    "store was made with, all of them and in the same order"
                )
        assert marks[0] is not None
        return bytes.fromhex(marks[0]["store"])

    def _mark(self, table: str) -> bytes:
        store = secrets.token_bytes(16)
        facts = {"store": store.hex(), "table": table, "folders": len(self.paths)}
        # The first last: until it is there the store is not, and is made again.
        for number in range(len(self.paths) - 1, -1, -1):
            write_whole(
                self.paths[number] / MARK, json.dumps({**facts, "number": number}).encode(), table
            )
        return store

    def close(self) -> None:
        """Lets other processes have the folders."""
        for lock in self._locks:
            lock.close()


def _read_mark(path: Path, table: str) -> dict[str, Any] | None:
    try:
        text = (path / MARK).read_text()
    except FileNotFoundError:
        return None
    try:
        mark: dict[str, Any] = json.loads(text)
        found = mark["store"], mark["number"], mark["folders"], mark["table"]
        del found
    except (ValueError, KeyError, TypeError) as error:
        raise MismatchError(
            f"table {table!r}: {path / MARK} is damaged ({error}); put back a copy of it"
        ) from error
    return mark


def _lock(folder: Path, table: str) -> IO[bytes]:
    """An open file whose lock is held as long as it, or the process, lives."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    file = open(descriptor, "rb", buffering=0)  # noqa: SIM115 - kept open
    try:
        # A dead process holds no such lock, whatever its file says.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = file.read(20).decode(errors="replace") or "unknown"
        file.close()
        raise LockedError(
            f"table {table!r}: process {holder} has the store in {folder} open; end it, or give "
            "this one folders of its own"
        ) from None
    with contextlib.suppress(OSError):  # a full disk may have no room for a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return file


def write_whole(path: Path, data: bytes, table: str) -> None:
    """Writes a file that is there whole, or as it was before, after a crash at any moment."""
    temporary = path.with_name(f"{path.name}.tmp")
    with no_space(path, table):
        try:
            with open(temporary, "wb", buffering=0) as file:
                write_all(file.fileno(), data, 0)
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    try:
        sync(path.parent)
    except OSError as error:
        raise uncertain(path, table, error.strerror or str(error)) from error


def uncertain(path: Path, table: str, why: str) -> UncertainError:
    """The error of a rename that may not be on the disk."""
    return UncertainError(
        f"table {table!r}: {path} was written, but its folder could not be synced ({why}), so that "
        "it is not known what a crash would leave; see to the disk, then close the store and open "
        "it again"
    )


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Writes bytes at an offset of a file: all, or an OSError."""
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, offset)
        if not done:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view, offset = view[done:], offset + done


@contextlib.contextmanager
def no_space(path: Path, table: str) -> Iterator[None]:
    """Turns the error of a full disk into one that says what to do."""
    try:
        yield
    except (OSError, ValueError) as error:
        if os_code(error) in NO_SPACE:
            raise full(path, table, error) from error
        raise


def full(path: Path, table: str, error: BaseException) -> NoSpaceError:
    """The error of a full disk."""
    why = os.strerror(os_code(error) or errno.ENOSPC)
    return NoSpaceError(
        f"table {table!r}: no space to write {path} ({why}); nothing appended is lost while this "
        "process runs: make room (or raise the limit) and flush again, or give the table more disks"
    )
