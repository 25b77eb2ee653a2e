# SPDX-License-Identifier: Apache-2.0
"""What is looked at before a store is used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxsparse.store.ssd.errors import MismatchError
from jaxsparse.store.ssd.files import SegmentFiles
from jaxsparse.store.ssd.folders import LOCK, MANIFEST, Folders
from jaxsparse.store.ssd.journal import Journal, Manifest, damaged
from jaxsparse.store.ssd.recovery import (
    live_entries,
    load_columns,
    remove_leftovers,
    replay,
    superseded,
)
from jaxsparse.store.ssd.segments import Segments


def check_arguments(row_bytes: int, segment_bytes: int) -> None:
    """Raises ValueError where a size is out of range."""
    if row_bytes < 1:
        raise ValueError(f"row_bytes must be at least 1, got {row_bytes}")
    if segment_bytes < 4096:
        raise ValueError(f"segment_bytes must be at least 4096, got {segment_bytes}")


def check_direct(folders: Sequence[Path], table: str) -> None:
    """Raises ValueError where a folder's file system has no direct reads."""
    for folder in folders:
        try:
            os.close(os.open(folder / LOCK, os.O_RDONLY | os.O_DIRECT))
        except OSError as error:
            raise ValueError(
                f"table {table!r}: direct=True, but the file system of {folder} has no direct "
                f"reads ({error.strerror}); leave direct=False"
            ) from error


def open_journal(folders: Folders, table: str, row_bytes: int) -> Journal:
    """The journal of a store, made where the store is new.

    Raises:
        DamagedJournalError: it is damaged, or missing beside segments.
        MismatchError: it is of another table, or of other rows.
    """
    first = folders.paths[0]
    journal = Journal.load(first, table)
    if journal is None:
        if any(next(path.glob("segment-*"), None) for path in folders.paths):
            raise damaged(first / MANIFEST, table, "it is missing, but there are segments")
        return Journal.create(first, Manifest(table, row_bytes, folders.store.hex(), 1))
    found = journal.manifest
    if (found.table, found.row_bytes, found.store) != (table, row_bytes, folders.store.hex()):
        raise MismatchError(
            f"{first} holds table {found.table!r} with rows of {found.row_bytes} bytes, not table "
            f"{table!r} with rows of {row_bytes}; give this table folders of its own, or open the "
            "store as it was made"
        )
    return journal


def recover(journal: Journal, folders: Folders, files: SegmentFiles) -> Segments:
    """The segments of the last commit; of a key's rows all but the newest are released.

    Raises:
        DamagedJournalError: the log is damaged.
        DamagedSegmentError: a segment is missing, cut, or its columns are changed.
    """
    now = journal.manifest
    found = replay(journal.records(), folders.paths, now.row_bytes)
    journal.remove_leftovers()
    remove_leftovers(folders.paths, found)
    load_columns(files, found)
    segments = Segments(now.table, found, now.next_segment)
    keys, locations = live_entries(files, found)
    older = superseded(files, found, keys, locations)
    if older.size:
        segments.release(np.sort(locations[older]))
    return segments
