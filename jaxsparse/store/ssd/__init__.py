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
    UncertainError,
    UnknownLocationError,
)
from jaxsparse.store.ssd.scattered import Implementation
from jaxsparse.store.ssd.store import SegmentStore

FAULT_POINTS = (
    "ssd_in_segment",
    "ssd_before_log",
    "ssd_in_log",
    "ssd_before_manifest",
    "ssd_in_rotate",
    "ssd_after_manifest",
    "ssd_in_compact",
    "ssd_in_delete",
)
"""Where tests end the process; see `jaxsparse.durable.FAULT`."""

__all__ = [
    "FAULT_POINTS",
    "DamagedJournalError",
    "DamagedSegmentError",
    "Implementation",
    "LockedError",
    "MismatchError",
    "NoSpaceError",
    "SegmentStore",
    "StoreError",
    "UncertainError",
    "UnknownLocationError",
]
