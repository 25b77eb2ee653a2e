# SPDX-License-Identifier: Apache-2.0
"""A segment as the process sees it, and the folder it lies in."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jaxsparse.store.ssd.checksums import Bytes, Int64s, Uint32s
from jaxsparse.store.ssd.layout import ROW_BITS, Columns, SegmentShape, Uint64s


@dataclasses.dataclass(eq=False)
class Segment:
    """Rows that are written together, and once.

    ``rows`` is there until the file is: a reader that finds it None reads the file.
    """

    number: int
    folder: int
    shape: SegmentShape
    path: Path
    crcs: Uint32s
    """``[n]``; stays in memory, so that scattered rows can be checked."""
    released: npt.NDArray[np.bool_]
    """``[n]``."""
    keys: Uint64s | None = None
    stamps: Int64s | None = None
    rows: Bytes | None = None
    memory: Bytes | None = None
    """What ``rows`` is a view of; aligned, and as long as a multiple of 4096."""
    num_released: int = 0
    written: Future[None] | None = None
    """Of the write under way, or the last one."""
    readers: int = 0
    """Reads that were asked for and have not ended."""

    def __post_init__(self) -> None:
        # Derived once: read for every segment of every scattered read.
        self.data_offset = self.shape.data_offset
        self.crc_address = int(self.crcs.__array_interface__["data"][0])

    @property
    def num_live(self) -> int:
        """Rows that were not released."""
        return self.shape.num_rows - self.num_released

    def live_rows(self) -> Int64s:
        """Numbers of the rows that were not released, ascending."""
        return np.flatnonzero(~self.released)

    def locations(self, rows: Int64s) -> Int64s:
        """Of rows by their numbers."""
        return (np.int64(self.number) << ROW_BITS) | rows

    def image(self) -> Bytes:
        """Its rows as they lie in the file, which ends at a multiple of 4096."""
        assert self.memory is not None
        image = self.memory[: self.shape.file_bytes - self.shape.data_offset]
        image[self.shape.num_rows * self.shape.row_bytes :] = 0
        return image

    def columns(self) -> Columns:
        """Of a segment that was not written yet."""
        assert self.keys is not None
        return Columns(self.keys, self.crcs, self.stamps)


def segment_name(number: int) -> str:
    """Of a segment's file; tensorstore's key.

    >>> segment_name(7)
    'segment-000000000007'
    """
    return f"segment-{number:012d}"
