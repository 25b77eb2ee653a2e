# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a store on disks."""

from __future__ import annotations

import errno
import re

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""A full disk, a used-up quota, a limit on file sizes."""

_CODE = re.compile(r"os_error_code='(\d+)'")


class StoreError(RuntimeError):
    """A store that cannot be opened, written or read; its last flush is as it was."""


class DamagedSegmentError(StoreError):
    """A segment whose file is missing, cut or changed."""


class DamagedJournalError(StoreError):
    """A manifest or log that is missing, cut or changed."""


class NoSpaceError(StoreError):
    """A disk is full; what was appended before stays readable."""


class UncertainError(StoreError):
    """A commit was written, but the disk did not say that it holds it."""


class LockedError(StoreError):
    """Another process has the store."""


class MismatchError(StoreError, ValueError):
    """A store of another table, of other rows, or of other folders."""


class UnknownLocationError(StoreError, LookupError):
    """A location that was never given out, or was released."""


def os_code(error: BaseException) -> int | None:
    """The errno of an OSError, or of an error of tensorstore that tells of one."""
    if isinstance(error, OSError):
        return error.errno
    found = _CODE.search(str(error))
    return int(found.group(1)) if found else None


def reason_of(error: BaseException) -> str:
    """An error's text without tensorstore's notes on where in its source it arose."""
    return str(error).split(" [source locations")[0]
