# SPDX-License-Identifier: Apache-2.0
"""How a segment lies in its file, and what a location is.

```
header (64) | keys u64 [n] | crc32c u32 [n] | stamps i64 [n], if moved | zeros | rows [n, row_bytes]
                                                                              ^ a multiple of 4096
```

All numbers are little-endian. A location is the segment's number and the row's number in it; the
numbers of segments grow, so that of two rows of a key the one at the higher location is newer. Rows
that compaction moved keep the location they were first written to as their *stamp*, and are as new
as that.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.store.ssd.checksums import Bytes, Int64s, Uint32s, crc32c

SEGMENT_BYTES = 8 << 20
"""Most bytes of a segment's file, unless the user says how many."""

ROW_BITS = 24
ROW_MASK = (1 << ROW_BITS) - 1
ALIGNMENT = 4096
"""Bytes: where rows begin, and of what a file's size is a multiple; direct reads need it."""

MAGIC = b"jaxsseg1"
_HEADER = struct.Struct("<8sQ16sIIII8x")
HEADER_BYTES = 64

Uint64s = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True)
class SegmentShape:
    """Sizes of a segment's file."""

    num_rows: int
    row_bytes: int
    moved: bool
    """Whether compaction wrote it: it has stamps."""

    @property
    def columns_bytes(self) -> int:
        """Of the header and the columns."""
        return HEADER_BYTES + self.num_rows * (20 if self.moved else 12)

    @property
    def data_offset(self) -> int:
        """Of row 0."""
        return aligned_size(self.columns_bytes)

    @property
    def file_bytes(self) -> int:
        """Of the whole file."""
        return self.data_offset + aligned_size(self.num_rows * self.row_bytes)


@dataclasses.dataclass(frozen=True)
class Columns:
    """What a segment's file says of its rows."""

    keys: Uint64s
    crcs: Uint32s
    stamps: Int64s | None


class BadColumnsError(ValueError):
    """Bytes that are not the head of the segment they should be of; the text says why."""


def rows_per_segment(segment_bytes: int, row_bytes: int) -> int:
    """Most rows of a segment whose file is not larger than ``segment_bytes``; at least one.

    >>> rows_per_segment(8 << 20, 512)
    15752
    """
    room = segment_bytes - HEADER_BYTES - 2 * ALIGNMENT
    return min(max(1, room // (row_bytes + 20)), ROW_MASK + 1)


def pack_head(number: int, store: bytes, shape: SegmentShape, columns: Columns) -> Bytes:
    """What lies before the rows in a segment's file.

    Args:
        number: of the segment.
        store: the store's 16 bytes, drawn when it was made.
        shape: of the file.
        columns: of its rows.

    Returns:
        ``[data_offset]`` uint8, aligned as direct writes need it.
    """
    stamps = [] if columns.stamps is None else [columns.stamps.astype("<i8")]
    parts = [columns.keys.astype("<u8"), columns.crcs.astype("<u4"), *stamps]
    body = b"".join(part.tobytes() for part in parts)
    fields = MAGIC, number, store, shape.num_rows, shape.row_bytes, int(shape.moved)
    header = _HEADER.pack(*fields, _digest(fields, body)).ljust(HEADER_BYTES, b"\0")
    head = aligned_bytes(shape.data_offset)
    head[: shape.columns_bytes] = np.frombuffer(header + body, np.uint8)
    head[shape.columns_bytes :] = 0
    return head


def aligned_bytes(size: int) -> Bytes:
    """``[size]`` uint8, not set, whose first is at a multiple of `ALIGNMENT`."""
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -int(buffer.__array_interface__["data"][0]) % ALIGNMENT
    return buffer[start : start + size]


def unpack_columns(data: bytes, number: int, store: bytes, shape: SegmentShape) -> Columns:
    """Columns from the first `SegmentShape.columns_bytes` of a segment's file.

    Raises:
        BadColumnsError: they are damaged, or of another segment.
    """
    if len(data) < shape.columns_bytes:
        raise BadColumnsError(
            f"it ends after {len(data)} of {shape.columns_bytes} bytes of columns"
        )
    *fields, digest = _HEADER.unpack_from(data)
    body = memoryview(data)[HEADER_BYTES : shape.columns_bytes]
    if fields[0] != MAGIC or digest != _digest(fields, body):
        raise BadColumnsError("the checksum of its header and keys differs")
    if fields[1:] != [number, store, shape.num_rows, shape.row_bytes, int(shape.moved)]:
        raise BadColumnsError("it is another segment's file")
    rows = shape.num_rows
    stamps = np.frombuffer(body, "<i8", rows, 12 * rows) if shape.moved else None
    return Columns(
        np.frombuffer(body, "<u8", rows), np.frombuffer(body, "<u4", rows, 8 * rows), stamps
    )


def _digest(fields: Any, body: bytes | memoryview) -> int:
    return crc32c(_HEADER.pack(*fields, 0) + body)


def aligned_size(size: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT
