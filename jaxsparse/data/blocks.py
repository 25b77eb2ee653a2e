# SPDX-License-Identifier: Apache-2.0
"""What files are cut into: blocks of rows that are found once, and then read in any order."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from jaxsparse.data.bad_rows import BadRows
from jaxsparse.data.batch import Batch
from jaxsparse.data.sources import Source

BLOCK_BYTES = 1 << 21
"""Of text in a block: 8,000 rows of Criteo's format."""

BLOCK_ROWS = 1 << 16
"""Most rows of a Parquet row group decoded at a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Some rows of a file, one after another."""

    num_rows: int
    """Rows it yields: without those that are skipped."""

    offset: int
    """Where it begins: a byte of the (decompressed) text, or a row of the row group."""

    size: int
    """How much is read: bytes of text, or rows."""

    first_row: int
    """Number of its first line in the file, from 1; in Parquet files of its first row, from 0."""

    group: int = 0
    """Row group of a Parquet file."""


@dataclasses.dataclass(frozen=True)
class FileIndex:
    """The blocks of one file."""

    runs: list[list[Block]]
    """Blocks of a run are read in order, because one decoder gives them; runs in any order."""

    bad: BadRows
    """What is skipped."""

    header: tuple[str, ...] = ()
    """Names of the columns, where a first line has them."""

    @property
    def num_rows(self) -> int:
        """Rows of all blocks."""
        return sum(block.num_rows for run in self.runs for block in run)


class Reader(Protocol):
    """An open file."""

    def read(self, block: Block) -> Batch:
        """The rows of a block that are not skipped, decoded."""
        ...

    def close(self) -> None:
        """Closes the file."""
        ...


class Format(Protocol):
    """A kind of file: finds blocks and reads them. Frozen: threads share it."""

    def index(self, source: Source) -> FileIndex:
        """Finds the blocks, and counts their rows, in memory that a large file does not enlarge."""
        ...

    def open(self, source: Source, index: FileIndex) -> Reader:
        """Opens a file whose blocks are known."""
        ...
