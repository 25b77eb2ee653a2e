# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a CSV file, and on which line: read again, slowly, once something failed.

Arrow reads fast, but its errors name no line. This scan has plain Python's view of the file.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from jaxsparse.data.schema import ColumnSchema, DataError, FeatureColumn

Check = Callable[[str], str | None]
"""Takes a cell; returns what was expected instead, or None if the cell is right."""

_INTEGER = re.compile(r"-?[0-9]+")


def open_text(path: Path, errors: str) -> IO[str]:
    """The text of a plain or gzipped file, without its byte order mark."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", errors=errors, newline="")
    return path.open(encoding="utf-8-sig", errors=errors, newline="")


def read_header(path: Path, delimiter: str) -> list[str]:
    """Names of the columns: the cells of the first line.

    Raises:
        DataError: there is none, or a name appears twice.
        OSError, EOFError: the file cannot be read or decompressed.
    """
    with open_text(path, "replace") as text:
        return parse_header(text, str(path), delimiter)


def parse_header(lines: Iterable[str], path: str, delimiter: str) -> list[str]:
    """Names of the columns: the cells of the first of ``lines``.

    Raises:
        DataError: there is none, or a name appears twice.
    """
    header = next(csv.reader(lines, delimiter=delimiter), None)
    if header is None:
        raise DataError(f"{path}: the file is empty")
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
    # Bytes that are no UTF-8 come through as lone surrogates.
    with open_text(path, "surrogateescape") as text:
        reader = csv.reader(text, delimiter=schema.delimiter)
        header = next(reader)
        for problem in problems(text, header, schema):
            line = reader.line_num + problem.last_line
            raise DataError(f"{path}, line {line}: {problem.text}")


def problems(
    lines: Iterable[str], header: Sequence[str], schema: ColumnSchema
) -> Iterator[Problem]:
    """Rows with a wrong number of cells or a wrong cell, each with its first problem."""
    reader = csv.reader(lines, delimiter=schema.delimiter)
    checks = [(header.index(column), name, check) for column, name, check in _checks(schema)]
    previous = 0
    for cells in reader:
        first, previous = previous + 1, reader.line_num
        found = _problem(cells, header, checks) if cells else None
        if found:
            yield Problem(first, reader.line_num, *found)


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
    yield schema.label, "label column", label
    yield from ((name, "dense column", _finite) for name in schema.dense)
    if schema.weight is not None:
        yield schema.weight, "weight column", _weight
    for feature in schema.feature_columns().values():
        yield str(feature.column), "feature column", _keys_check(feature)


def _keys_check(feature: FeatureColumn) -> Check:
    one: Check = _integer if feature.type == "integer" else _text
    if feature.limit is not None:
        one = partial(_integer_below, feature.limit)
    separator = feature.separator
    if separator is None:
        return one if feature.missing is None else lambda cell: one(cell) if cell else None

    def check(cell: str) -> str | None:
        items = cell.split(separator) if cell else []
        expected = next(filter(None, map(one, items)), None)
        if "" in items and expected is None:
            expected = "not empty"
        return expected and f"keys between {separator!r}, each {expected}"

    return check


def _not_utf8(cell: str) -> str | None:
    return "UTF-8" if any("\udc80" <= char <= "\udcff" for char in cell) else None


def _text(cell: str) -> str | None:
    del cell
    return None


def _integer(cell: str) -> str | None:
    if not _INTEGER.fullmatch(cell):
        return 'an integer (strings need type = "string")'
    return None if -(2**63) <= int(cell) < 2**64 else "an integer of 64 bits"


def _integer_below(limit: int, cell: str) -> str | None:
    return _integer(cell) or (None if 0 <= int(cell) < limit else f"in 0..{limit - 1}")


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _finite(cell: str) -> str | None:
    # Beyond float32 it would become infinite later.
    return None if abs(_number(cell)) < 3.4028236e38 else "a finite number"


def _weight(cell: str) -> str | None:
    return _finite(cell) or (None if _number(cell) >= 0 else "a number >= 0")


def _zero_or_one(cell: str) -> str | None:
    return None if _number(cell) in (0.0, 1.0) else "0 or 1"
