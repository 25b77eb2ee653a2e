# SPDX-License-Identifier: Apache-2.0
"""What a store holds, durably: a small manifest that names a log and how much of it counts.

The log begins with a snapshot (all segments, and a bit a row that says whether it was released);
the tail tells of later segments and releases. A commit appends to the log, waits for the disk, and
only then renames a manifest into place that counts the new bytes. When the tail has outgrown the
snapshot a new log takes over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxsparse.durable import fault_point
from jaxsparse.store.ssd.checksums import Int64s, crc32c
from jaxsparse.store.ssd.errors import DamagedJournalError, UncertainError
from jaxsparse.store.ssd.folders import MANIFEST, no_space, uncertain, write_all, write_whole

FORMAT = 1
SEGMENTS, RELEASED, DROPPED, BITS = 1, 2, 3, 4
"""Kinds of records: arrays of `ENTRY`, of locations, of segment numbers; bits of all segments."""

ENTRY = np.dtype([("number", "<i8"), ("folder", "<i4"), ("num_rows", "<i4"), ("moved", "<i8")])
TAIL_BYTES = 1 << 20
"""A tail up to this, and twice the snapshot, is kept; then a new log is written."""

_HEAD = struct.Struct("<IIQ")
Record = tuple[int, bytes]


@dataclasses.dataclass
class Manifest:
    """What is committed."""

    table: str
    row_bytes: int
    store: str
    """The store's 16 bytes in hexadecimal."""
    next_segment: int
    """Numbers below it were used."""
    log: int = 0
    """Number of the log in use."""
    snapshot_bytes: int = 0
    """Of the log, at its begin."""
    log_bytes: int = 0
    """Of the log that count."""
    format: int = FORMAT


class Journal:
    """Manifest and log in a store's first folder; one user at a time."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.is_certain = True
        """Whether the manifest on the disk is known: not after its folder could not be synced."""

    @classmethod
    def create(cls, folder: Path, manifest: Manifest) -> Journal:
        """An empty one."""
        journal = cls(folder, manifest)
        journal.rotate([], manifest.next_segment)
        return journal

    @classmethod
    def load(cls, folder: Path, table: str) -> Journal | None:
        """The one in a folder; None where there is no manifest.

        Raises:
            DamagedJournalError: the manifest is not what was written.
        """
        path = folder / MANIFEST
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            facts = json.loads(text)
            digest = facts.pop("crc32c")
            if digest != crc32c(json.dumps(facts).encode()) or facts["format"] != FORMAT:
                raise ValueError("the checksum differs")
            return cls(folder, Manifest(**facts))
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(path, table, str(error)) from error

    def path_of(self, log: int) -> Path:
        """Of a log's file."""
        return self.folder / f"log-{log:06d}"

    @property
    def path(self) -> Path:
        """Of the log in use."""
        return self.path_of(self.manifest.log)

    def records(self) -> list[Record]:
        """All records that count, in order; what a crash left behind them is cut off.

        Raises:
            DamagedJournalError: the log is missing, cut or changed.
        """
        size = self.manifest.log_bytes
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            data = b""
        if len(data) < size:
            raise self._damaged(f"it has {len(data)} bytes, not {size}")
        if len(data) > size:
            os.truncate(self.path, size)
        found, at = [], 0
        while at < size:
            kind, digest, length = _HEAD.unpack_from(data, at)
            payload = data[at + _HEAD.size : at + _HEAD.size + length]
            if digest != crc32c(payload) or len(payload) < length:
                raise self._damaged(f"the checksum of its record at byte {at} differs")
            found.append((kind, payload))
            at += _HEAD.size + length
        return found

    def commit(self, records: Iterable[Record], next_segment: int) -> None:
        """Appends records and counts them; on an error nothing is counted.

        Raises:
            NoSpaceError: the disk is full.
            UncertainError: the manifest is renamed but maybe not on the disk, now or earlier.
        """
        self._check_certain()
        before = self.manifest.log_bytes
        data = _pack(records)
        half = len(data) // 2
        descriptor = os.open(self.path, os.O_WRONLY)
        try:
            with no_space(self.path, self.manifest.table):
                write_all(descriptor, data[:half], before)
                fault_point("ssd_in_log")
                write_all(descriptor, data[half:], before + half)
                os.fsync(descriptor)
        finally:  # what an error leaves does not count, and is written over
            os.close(descriptor)
        fault_point("ssd_before_manifest")
        self._publish(log_bytes=before + len(data), next_segment=next_segment)

    @property
    def is_long(self) -> bool:
        """Whether `rotate` is due."""
        now = self.manifest
        return now.log_bytes - now.snapshot_bytes > max(TAIL_BYTES, 2 * now.snapshot_bytes)

    def rotate(self, snapshot: Iterable[Record], next_segment: int) -> None:
        """Begins a new log with a snapshot of all there is.

        Raises:
            NoSpaceError: the disk is full; the old log stays in use.
        """
        self._check_certain()
        old, number = self.path, self.manifest.log + 1
        data = _pack(snapshot)
        write_whole(self.path_of(number), data, self.manifest.table)
        fault_point("ssd_in_rotate")
        size = len(data)
        self._publish(log=number, snapshot_bytes=size, log_bytes=size, next_segment=next_segment)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(old)

    def remove_leftovers(self) -> None:
        """Deletes logs that a crash left."""
        for path in [*self.folder.glob("log-*"), *self.folder.glob("*.tmp")]:
            if path != self.path:
                path.unlink()

    def _publish(self, **changes: Any) -> None:
        manifest = dataclasses.replace(self.manifest, **changes)
        facts = dataclasses.asdict(manifest)
        facts["crc32c"] = crc32c(json.dumps(facts).encode())
        try:
            write_whole(self.folder / MANIFEST, json.dumps(facts).encode(), manifest.table)
        except UncertainError:
            self.is_certain = False
            raise
        self.manifest = manifest
        fault_point("ssd_after_manifest")

    def _check_certain(self) -> None:
        if not self.is_certain:
            raise uncertain(self.folder / MANIFEST, self.manifest.table, "an earlier commit failed")

    def _damaged(self, why: str) -> DamagedJournalError:
        return damaged(self.path, self.manifest.table, why)


def damaged(path: Path, table: str, why: str) -> DamagedJournalError:
    """The error of a damaged manifest or log."""
    return DamagedJournalError(
        f"table {table!r}: {path} is damaged ({why}); put back a copy of it, or remove the store's "
        "folders and resume from a checkpoint"
    )


def _pack(records: Iterable[Record]) -> bytes:
    return b"".join(
        _HEAD.pack(kind, crc32c(payload), len(payload)) + payload for kind, payload in records
    )


def locations_record(kind: int, locations: Int64s) -> Record:
    """A record of locations, or of segment numbers."""
    return kind, np.ascontiguousarray(locations, "<i8").tobytes()
