# SPDX-License-Identifier: Apache-2.0
"""Bytes out of a gzipped file of one or many members, every one of them checked to its end.

The standard library's reader does the same, but its errors do not say where in the file.
"""

from __future__ import annotations

import zlib
from typing import Any

from jaxsparse.data.schema import DataError
from jaxsparse.data.sources import Source, read_errors

COMPRESSED_BYTES = 1 << 18
"""Read from the file at a time."""

_GZIP = 31
"""zlib's ``wbits`` of a gzip header and trailer: length and CRC are checked."""


class GzipStream:
    """Decompressed bytes in order."""

    def __init__(self, source: Source) -> None:
        """Opens the file."""
        self._source = source
        self._file: Any = source.open()
        self._position = 0  # in the file, of the first byte that no member has taken
        self._waiting = b""
        self._member: Any = None
        self._member_start = 0
        self._ended = False

    def read(self, num_bytes: int) -> bytes:
        """The next ``num_bytes``; fewer only at the end of the file.

        Raises:
            DataError: the file ends inside a member, or is damaged; the text has the byte offset.
        """
        parts: list[bytes] = []
        missing = num_bytes
        while missing and not self._ended:
            part = self._some(missing)
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _some(self, most: int) -> bytes:
        if not self._waiting:
            with read_errors(self._source):
                self._waiting = self._file.read(COMPRESSED_BYTES)
            if not self._waiting:
                self._end()
                return b""
        if self._member is None and not self._begin_member():
            return b""
        before = len(self._waiting)
        try:
            data: bytes = self._member.decompress(self._waiting, most)
        except zlib.error as error:
            raise self._error(f"the gzip data is damaged: {error}") from error
        if self._member.eof:
            self._waiting = self._member.unused_data
            self._member = None
        else:
            self._waiting = self._member.unconsumed_tail
        self._position += before - len(self._waiting)
        return data

    def _begin_member(self) -> bool:
        """Starts the next member; zeros between members are padding."""
        rest = self._waiting.lstrip(b"\0") if self._position else self._waiting
        self._position += len(self._waiting) - len(rest)
        self._waiting = rest
        if not rest:
            return False
        self._member = zlib.decompressobj(_GZIP)
        self._member_start = self._position
        return True

    def _end(self) -> None:
        if self._member is not None:
            raise self._error(
                f"the gzip data ends at byte {self._position}, inside the member that starts at "
                f"byte {self._member_start}"
            )
        self._ended = True

    def _error(self, reason: str) -> DataError:
        where = "" if "at byte" in reason else f", near byte {self._position}"
        return DataError(
            f"{self._source.path}: cannot be read: {reason}{where} "
            f"(the file has {self._source.num_bytes} bytes; is it complete?)"
        )
