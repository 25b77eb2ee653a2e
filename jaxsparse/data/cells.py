# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a CSV file, and on which line: read again, slowly, once something failed.

Arrow reads fast, but its errors name no line. This scan has plain Python's view of the file.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from jaxsparse.data.schema import ColumnSchema, DataError, FeatureColumn, hint_at_keys

Check = Callable[[str], str | None]
"""Takes a cell; returns what was expected instead, or None if the cell is right."""

LONGEST_CELL = 1 << 26
"""Characters that a cell may have: far above Python's own limit of 2**17."""

_INTEGER = re.compile(r"-?[0-9]+")
# What arrow reads as a finite number; Python's float knows more, such as 1_0.
_NUMBER = re.compile(r"[ \t]*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?[ \t]*")


def open_text(path: Path, errors: str) -> IO[str]:
    """The text of a plain or gzipped file, without its byte order mark."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", errors=errors, newline="")
    return path.open(encoding="utf-8-sig", errors=errors, newline="")


def read_header(path: Path, delimiter: str) -> list[str]:
    """Names of the columns: the cells of the first line.

    Raises:
        DataError: there is none, or a name appears twice.
        OSError, EOFError: the file cannot be read or decompressed.
    """
    with open_text(path, "replace") as text:
        if isinstance(text, io.TextIOWrapper):
            check_begin(text.buffer.peek(4), str(path))
        return parse_header(text, str(path), delimiter)


def check_begin(data: bytes, path: str) -> None:
    """Raises DataError if a file that begins with ``data`` is none of lines of text."""
    if data.startswith(b"\x1f\x8b"):
        raise DataError(f"{path}: the file is gzipped; let its name end with .csv.gz or .tsv.gz")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path}: the file is UTF-16; save it as UTF-8")
    if data.startswith(b"PAR1"):
        raise DataError(f"{path}: this is a Parquet file; let its name end with .parquet")


def parse_header(lines: Iterable[str], path: str, delimiter: str) -> list[str]:
    """Names of the columns: the cells of the first of ``lines``.

    Raises:
        DataError: there is none, it is blank, or a name appears twice.
    """
    header: list[str] | None = next(_reader(lines, delimiter), None)
    if header is None:
        raise DataError(f"{path}: the file is empty")
    if not any(name.strip() for name in header):
        raise DataError(f"{path}, line 1: the header line is blank; it must name the columns")
    for name in header:
        if header.count(name) > 1:
            raise DataError(f"{path}, line 1: column {name!r} appears twice in the header")
    return header


@dataclasses.dataclass(frozen=True)
class Problem:
    """A row that cannot be used."""

    first_line: int
    """Number of its first line among those read, from 1."""
    last_line: int
    """Number of its last line."""
    reason: str
    """Without the value, for counting."""
    text: str
    """What was expected, and what came."""


def raise_first_problem(path: Path, schema: ColumnSchema) -> None:
    """Raises DataError for the first line with a wrong number of cells or a wrong cell."""
    for find in (problems, mixed_signs):
        # Bytes that are no UTF-8 come through as lone surrogates.
        with open_text(path, "surrogateescape") as text:
            reader = _reader(text, schema.delimiter)
            header = next(reader)
            for problem in find(text, header, schema):
                line = reader.line_num + problem.last_line
                raise DataError(f"{path}, line {line}: {problem.text}")


def _reader(lines: Iterable[str], delimiter: str) -> Any:
    # The limit is the whole process's; at its default it hides what is wrong with a long cell.
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_CELL))
    return csv.reader(lines, delimiter=delimiter)


def problems(
    lines: Iterable[str], header: Sequence[str], schema: ColumnSchema
) -> Iterator[Problem]:
    """Rows with a wrong number of cells or a wrong cell, each with its first problem."""
    reader = _reader(lines, schema.delimiter)
    checks = [(header.index(column), name, check) for column, name, check in _checks(schema)]
    previous = 0
    for cells in reader:
        first, previous = previous + 1, reader.line_num
        found = _problem(cells, header, checks) if cells else _blank(header)
        if found:
            yield Problem(first, reader.line_num, *found)


def mixed_signs(
    lines: Iterable[str], header: Sequence[str], schema: ColumnSchema
) -> Iterator[Problem]:
    """Rows whose key no dtype holds together with one before, as 2**64 - 1 after -1."""
    features = [f for f in schema.feature_columns().values() if f.type == "integer"]
    first: dict[tuple[str, bool], int] = {}  # by column, and whether negative
    reader = _reader(lines, schema.delimiter)
    for cells in reader:
        for feature in features if len(cells) == len(header) else ():
            name = str(feature.column)
            cell = cells[header.index(name)]
            items = cell.split(feature.separator) if feature.separator else [cell]
            for key in (_value(item) for item in items if not_an_integer(item) is None):
                if 0 <= key < 2**63:
                    continue
                first.setdefault((name, key < 0), key)
                other = first.get((name, key >= 0))
                if other is not None:
                    expected = f"integers, all signed or all unsigned 64 bits, but has {other}"
                    reason = f"feature column {name!r} must be {expected}"
                    yield Problem(
                        reader.line_num, reader.line_num, reason, f"{reason} above, got {key}"
                    )


def _blank(header: Sequence[str]) -> tuple[str, str] | None:
    if len(header) > 1:
        return None
    return "blank line", 'the line is blank; in a file of one column an empty cell is written ""'


def _problem(
    cells: list[str], header: Sequence[str], checks: Sequence[tuple[int, str, Check]]
) -> tuple[str, str] | None:
    if len(cells) != len(header):
        return "number of columns", f"expected {len(header)} columns, got {len(cells)}"
    for index, name, check in checks:
        expected = _not_utf8(cells[index]) or check(cells[index])
        if expected:
            reason = f"{name} {header[index]!r} must be {expected}"
            return reason, f"{reason}, got {cells[index]!r}"
    return None


def _checks(schema: ColumnSchema) -> Iterator[tuple[str, str, Check]]:
    label = _zero_or_one if schema.label_kind == "binary" else _finite
    if schema.label is not None:
        yield schema.label, "label column", label
    yield from ((name, "dense column", _finite) for name in schema.dense)
    if schema.weight is not None:
        yield schema.weight, "weight column", _weight
    for feature in schema.feature_columns().values():
        yield str(feature.column), "feature column", keys_check(feature)


def keys_check(feature: FeatureColumn) -> Check:
    """Looks at the text of one cell of a feature."""
    one: Check = not_an_integer if feature.type == "integer" else _text
    if feature.limit is not None:
        one = partial(_integer_below, feature.limit)
    separator = feature.separator
    if separator is None:
        return one if feature.missing is None else lambda cell: one(cell) if cell else None

    def check(cell: str) -> str | None:
        items = cell.split(separator) if cell else []
        expected = "not empty" if "" in items else next(filter(None, map(one, items)), None)
        return expected and f"keys between {separator!r}, each {expected}"

    return check


def _not_utf8(cell: str) -> str | None:
    return "UTF-8" if any("\udc80" <= char <= "\udcff" for char in cell) else None


def _text(cell: str) -> str | None:
    del cell
    return None


def not_an_integer(cell: str) -> str | None:
    """What was expected of text that is no integer of 64 bits."""
    if not _INTEGER.fullmatch(cell):
        return f"an integer ({hint_at_keys(cell)})"
    # Python refuses to convert thousands of digits.
    is_short = len(cell.removeprefix("-").lstrip("0")) <= 20
    return None if is_short and -(2**63) <= _value(cell) < 2**64 else "an integer of 64 bits"


def _value(integer: str) -> int:
    """Of digits that may begin with any number of zeros."""
    digits = integer.removeprefix("-").lstrip("0") or "0"
    return -int(digits) if integer.startswith("-") else int(digits)


def _integer_below(limit: int, cell: str) -> str | None:
    return not_an_integer(cell) or (None if 0 <= _value(cell) < limit else f"in 0..{limit - 1}")


def _number(cell: str) -> float:
    return float(cell) if _NUMBER.fullmatch(cell) else math.nan


def _finite(cell: str) -> str | None:
    # Beyond float32 it would become infinite later.
    if abs(_number(cell)) < 3.4028236e38:
        return None
    return "a finite number" if cell else "a finite number (fill empty cells before)"


def _weight(cell: str) -> str | None:
    return _finite(cell) or (None if _number(cell) >= 0 else "a number >= 0")


def _zero_or_one(cell: str) -> str | None:
    return None if _number(cell) in (0.0, 1.0) else "0 or 1"
