# SPDX-License-Identifier: Apache-2.0
"""Text files, plain or gzipped, as blocks of whole lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from jaxsparse.data.bad_rows import BadRows
from jaxsparse.data.batch import Batch
from jaxsparse.data.blocks import BLOCK_BYTES, Block, FileIndex
from jaxsparse.data.gzip_stream import GzipStream
from jaxsparse.data.schema import DataError
from jaxsparse.data.sources import Source, read_errors

BOM = b"\xef\xbb\xbf"
LONGEST_LINE = 1 << 26
"""Bytes within which a line must end."""


@dataclasses.dataclass(frozen=True)
class Lines:
    """Whole lines of a file, decoded no further."""

    data: bytes
    path: str
    first_line: int
    """Number of the first line in the file, from 1."""
    header: tuple[str, ...]

    @property
    def num_lines(self) -> int:
        """Lines, blank ones too."""
        return count_lines(self.data)


class Parser(Protocol):
    """Makes batches of lines."""

    @property
    def has_header(self) -> bool:
        """Whether the first line of a file names the columns."""
        ...

    @property
    def has_quotes(self) -> bool:
        """Whether lines may end inside of quoted cells."""
        ...

    @property
    def skips(self) -> bool:
        """Whether bad rows are left out: only then they must be found before."""
        ...

    def header(self, line: bytes, path: str) -> tuple[str, ...]:
        """Names of the columns, all that are needed being there."""
        ...

    def num_rows(self, lines: Lines) -> int:
        """Rows of the lines, if none is bad."""
        ...

    def parse(self, lines: Lines) -> tuple[Batch, BadRows]:
        """The good rows; raises DataError at the first bad row unless they are skipped."""
        ...


@dataclasses.dataclass(frozen=True)
class TextFormat:
    """Lines, as a parser understands them."""

    parser: Parser
    block_bytes: int = BLOCK_BYTES

    def index(self, source: Source) -> FileIndex:
        """One pass over the text: it counts lines, or parses all where bad rows are skipped."""
        blocks: list[Block] = []
        bad = BadRows()
        header: tuple[str, ...] = ()
        line = 1
        stream = _open(source)
        try:
            for number, (offset, data) in enumerate(self._cut(stream, source)):
                if number == 0 and self.parser.has_header:
                    end = _first_row_end(data, self.parser.has_quotes)
                    header = self.parser.header(data[:end], source.path)
                    line += count_lines(data[:end])
                    offset, data = offset + end, data[end:]
                    if not data.strip():
                        line += count_lines(data)
                        continue
                lines = Lines(data, source.path, line, header)
                if not data.strip(b"\r\n"):
                    if len(header) == 1:  # they could be rows, which the parser refuses
                        bad.merge(self.parser.parse(lines)[1])
                    continue
                num_rows = self._num_rows(lines, bad)
                blocks.append(Block(num_rows, offset, len(data), line))
                line += lines.num_lines
        finally:
            stream.close()
        if self.parser.has_header and not header:
            raise DataError(f"{source.path}: the file is empty")
        runs = [blocks] if is_gzipped(source) else [[block] for block in blocks]
        return FileIndex(runs, bad, header)

    def open(self, source: Source, index: FileIndex) -> TextReader:
        """Opens the file."""
        return TextReader(self.parser, source, index.header)

    def _num_rows(self, lines: Lines, bad: BadRows) -> int:
        if not self.parser.skips:
            return self.parser.num_rows(lines)
        batch, skipped = self.parser.parse(lines)
        bad.merge(skipped)
        return batch.num_samples

    def _cut(self, stream: Any, source: Source) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of each block, at last of the blank lines that end the file, if any."""
        offset, waiting, chunk = 0, b"", BOM
        while chunk:
            with read_errors(source):
                chunk = stream.read(self.block_bytes)
            data = waiting + chunk
            if not offset and data.startswith(BOM):
                offset, data = len(BOM), data[len(BOM) :]
            end = _last_row_end(data, self.parser.has_quotes) if chunk else len(data)
            used = len(data[:end].rstrip(b"\r\n"))
            if used:
                newline = data.find(b"\n", used)
                end = newline + 1 if newline >= 0 else len(data)
                yield offset, data[:end]
                offset, data = offset + end, data[end:]
            waiting = data
            if len(waiting) > LONGEST_LINE:
                raise DataError(
                    f"{source.path}: no line ends within {LONGEST_LINE} bytes after byte {offset}; "
                    "is a quote never closed?"
                )
        if offset and waiting:
            yield offset, waiting


class TextReader:
    """An open text file."""

    def __init__(self, parser: Parser, source: Source, header: tuple[str, ...]) -> None:
        """Opens it at its begin."""
        self._parser, self._source, self._header = parser, source, header
        self._stream = _open(source)
        self._position = 0

    def read(self, block: Block) -> Batch:
        """The good rows of a block."""
        data = self._bytes(block)
        lines = Lines(data, self._source.path, block.first_row, self._header)
        batch, _ = self._parser.parse(lines)
        if len(data) != block.size or batch.num_samples != block.num_rows:
            raise DataError(
                f"{self._source.path}, lines from {block.first_row} on: {batch.num_samples} rows "
                f"where {block.num_rows} were counted; has the file changed, or does a cell hold a "
                "quote that is not doubled?"
            )
        return batch

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()

    def _bytes(self, block: Block) -> bytes:
        if not is_gzipped(self._source):
            with read_errors(self._source):
                self._stream.seek(block.offset)
                return bytes(self._stream.read(block.size))
        if block.offset < self._position:
            self._stream.close()
            self._stream, self._position = GzipStream(self._source), 0
        while self._position < block.offset:
            skipped = self._stream.read(min(BLOCK_BYTES, block.offset - self._position))
            if not skipped:
                break
            self._position += len(skipped)
        data = self._stream.read(block.size)
        self._position += len(data)
        return bytes(data)


def is_gzipped(source: Source) -> bool:
    """Whether the file's name ends with ``.gz``."""
    return source.name.lower().endswith(".gz")


def count_lines(data: bytes) -> int:
    """Lines, the last one with or without its end.

    >>> count_lines(b"a\\n\\nb")
    3
    """
    return data.count(b"\n") + bool(data and not data.endswith(b"\n"))


def _open(source: Source) -> Any:
    return GzipStream(source) if is_gzipped(source) else source.open()


def _last_row_end(data: bytes, has_quotes: bool) -> int:
    """Where the last whole row ends; 0 where there is none."""
    if has_quotes and b'"' in data:
        ends = row_ends(data)
        return int(ends[-1]) if len(ends) else 0
    return data.rfind(b"\n") + 1


def _first_row_end(data: bytes, has_quotes: bool) -> int:
    if has_quotes and b'"' in data:
        ends = row_ends(data)
        return int(ends[0]) if len(ends) else len(data)
    return data.find(b"\n") + 1 or len(data)


def row_ends(data: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Ends of the lines that are not inside of quotes; a doubled quote opens and closes."""
    text = np.frombuffer(data, np.uint8)
    inside = np.cumsum(text == ord('"')) & 1
    return np.flatnonzero((text == ord("\n")) & (inside == 0)) + 1
