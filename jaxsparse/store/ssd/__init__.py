# SPDX-License-Identifier: Apache-2.0
"""Rows of a table on disks: immutable, checksummed segments and a journal.

>>> from jaxsparse.store.ssd import SegmentStore
"""

from jaxsparse.store.ssd.errors import (
    DamagedJournalError,
    DamagedSegmentError,
    LockedError,
    MismatchError,
    NoSpaceError,
    StoreError,
    UnknownLocationError,
)
from jaxsparse.store.ssd.scattered import Implementation
from jaxsparse.store.ssd.store import SegmentStore

__all__ = [
    "DamagedJournalError",
    "DamagedSegmentError",
    "Implementation",
    "LockedError",
    "MismatchError",
    "NoSpaceError",
    "SegmentStore",
    "StoreError",
    "UnknownLocationError",
]
