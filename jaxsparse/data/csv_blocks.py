# SPDX-License-Identifier: Apache-2.0
"""Blocks of CSV lines, by a schema; files begin with a header."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxsparse.data.bad_rows import BadRows, OnBadRow, check_on_bad_row
from jaxsparse.data.batch import Batch
from jaxsparse.data.cells import check_begin, mixed_signs, parse_header, problems
from jaxsparse.data.schema import ColumnSchema, DataError
from jaxsparse.data.tables import csv_table, csv_types, require_all, table_batch
from jaxsparse.data.text_blocks import Lines, row_ends


@dataclasses.dataclass(frozen=True)
class CsvParser:
    """Batches of the columns a schema names.

    Blank lines are no rows. In a file of one column nobody knows, and they are bad rows.
    """

    schema: ColumnSchema
    on_bad_row: OnBadRow = "error"

    has_header = True
    has_quotes = True

    def __post_init__(self) -> None:
        """Validates the fields."""
        check_on_bad_row(self.on_bad_row)

    @property
    def skips(self) -> bool:
        """Whether bad rows are left out."""
        return self.on_bad_row == "skip"

    def header(self, line: bytes, path: str) -> tuple[str, ...]:
        """Names of the columns.

        Raises:
            DataError: one that is needed is not there, or one is there twice.
        """
        check_begin(line, path)
        text = line.decode(errors="replace")
        names = parse_header(text.splitlines(keepends=True), path, self.schema.delimiter)
        try:
            require_all(names, self.schema)
        except ValueError as error:
            raise DataError(f"{path}: {error}") from error
        return tuple(names)

    def num_rows(self, lines: Lines) -> int:
        """Lines that are not blank, those inside of quotes with the line they belong to."""
        data = lines.data
        if b'"' in data or b"\n\n" in data or b"\n\r" in data or data[:1] in (b"\n", b"\r"):
            return _count_rows(data)[0]
        return lines.num_lines

    def parse(self, lines: Lines) -> tuple[Batch, BadRows]:
        """The good rows.

        Raises:
            DataError: a row is bad and not to be skipped; or the columns are.
        """
        bad = BadRows()
        try:
            return self._parse_good(lines.data, lines.header), bad
        except (TypeError, ValueError) as error:
            try:
                good = self._good_lines(lines, bad)
                if not bad.total:
                    raise error
                return self._parse_good(good, lines.header), bad
            except DataError:
                raise
            except (TypeError, ValueError) as still:
                for problem in mixed_signs(_text_lines(lines.data), lines.header, self.schema):
                    line = lines.first_line + problem.last_line - 1
                    raise DataError(f"{lines.path}, line {line}: {problem.text}") from still
                where = f"{lines.path}, lines from {lines.first_line} on"
                raise DataError(f"{where}: {still}") from still

    def _parse_good(self, data: bytes, header: tuple[str, ...]) -> Batch:
        import pyarrow as pa

        from jaxsparse.arrow import reader_of

        if data and len(header) == 1 and _count_rows(data)[1]:
            raise ValueError("there are blank lines")
        if not data.strip(b"\r\n"):
            empty = pa.schema(list(csv_types(self.schema).items())).empty_table()
            return table_batch(empty, self.schema)
        return table_batch(
            csv_table(reader_of(data), self.schema, num_bytes=len(data), header=header), self.schema
        )

    def _good_lines(self, lines: Lines, bad: BadRows) -> bytes:
        text = _text_lines(lines.data)
        for problem in problems(text, lines.header, self.schema):
            line = lines.first_line + problem.last_line - 1
            bad.meet(self.on_bad_row, problem.reason, f"{lines.path}, line {line}: {problem.text}")
            for number in range(problem.first_line - 1, problem.last_line):
                text[number] = ""
        return "".join(text).encode(errors="surrogateescape")


def _text_lines(data: bytes) -> list[str]:
    text = data.decode(errors="surrogateescape").removesuffix("\n")
    return [f"{line}\n" for line in text.split("\n")]


def _count_rows(data: bytes) -> tuple[int, int]:
    """Rows, and blank lines."""
    ends = row_ends(data)
    if not len(ends) or ends[-1] < len(data):
        ends = np.append(ends, len(data))
    begins = np.concatenate([[0], ends[:-1]])
    text = np.frombuffer(data, np.uint8)
    # A blank line is an end of line alone; in "\\r\\n" it begins with the carriage return.
    blank = (text[begins] == ord("\n")) | (text[begins] == ord("\r"))
    return int(len(ends) - blank.sum()), int(blank.sum())
