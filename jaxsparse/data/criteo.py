# SPDX-License-Identifier: Apache-2.0
r"""Criteo's click logs: lines of a label, 13 integers and 26 categories between tabs.

Decided here, and tested: an integer x becomes ``log(1 + max(x, 0))`` and a missing one 0; a
category, a number of up to 8 hexadecimal digits, becomes that number and a missing one the key
`MISSING`, which no category has. Label: 0 or 1. There is no header unless it is asked for.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from jaxsparse.data.bad_rows import BadRows, OnBadRow, check_on_bad_row
from jaxsparse.data.batch import Array, Batch
from jaxsparse.data.hexadecimal import parse_hex
from jaxsparse.data.schema import DataError
from jaxsparse.data.text_blocks import Lines
from jaxsparse.ragged import Ragged

INTEGERS = tuple(f"I{number}" for number in range(1, 14))
"""Names of the dense values, in order."""

CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
"""Names of the features."""

COLUMNS = ("label", *INTEGERS, *CATEGORIES)

MISSING = 1 << 32
"""Key of a category that is missing; read as strings it is the empty string."""

Features = dict[str, Array | Ragged]
Categories = Literal["hex", "string"]

_INTEGER = re.compile(r"-?[0-9]{1,40}")
_HEX = re.compile(r"[0-9a-fA-F]{0,8}")
_HEX_LINE = re.compile(rb"[01](?:\t(?:-?[0-9]{1,18})?){13}(?:\t[0-9a-fA-F]{0,8}){26}")
_STRING_LINE = re.compile(rb"[01](?:\t(?:-?[0-9]{1,18})?){13}(?:\t[^\t\r]*){26}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriteoParser:
    """Batches with features C1..C26, 13 dense values, and labels."""

    categories: Categories = "hex"
    """``hex``: int64 keys; ``string``: the cells' text, for `Hashed` tables."""

    has_header: bool = False
    """Whether each file begins with a line to be left out."""

    on_bad_row: OnBadRow = "error"

    def __post_init__(self) -> None:
        """Validates the fields."""
        check_on_bad_row(self.on_bad_row)
        if self.categories not in get_args(Categories):
            raise ValueError(
                f"categories must be one of {get_args(Categories)}, got {self.categories!r}"
            )

    @property
    def has_quotes(self) -> bool:
        """A quote is a character like any other."""
        return False

    @property
    def skips(self) -> bool:
        """Whether bad rows are left out."""
        return self.on_bad_row == "skip"

    def header(self, line: bytes, path: str) -> tuple[str, ...]:
        """The columns' names, whatever the line calls them."""
        del line, path
        return COLUMNS

    def num_rows(self, lines: Lines) -> int:
        """Every line is a row, and a blank one a bad row."""
        return lines.num_lines

    def parse(self, lines: Lines) -> tuple[Batch, BadRows]:
        """The good rows.

        Raises:
            DataError: a row is bad and not to be skipped.
        """
        bad = BadRows()
        data = lines.data.replace(b"\r\n", b"\n") if b"\r" in lines.data else lines.data
        # Arrow takes 0x10 for 16, "1 " for 1, and a lone carriage return for the end of a line.
        is_plain = not any(byte in data for byte in (b"x", b" ", b"\r"))
        batch = self._parse_good(data) if is_plain else None
        if batch is None:
            good = self._good_lines(data, lines, bad)
            batch = self._parse_good(b"".join(line + b"\n" for line in good))
        if batch is None:
            raise DataError(f"{lines.path}, lines from {lines.first_line} on: cannot be parsed")
        return batch, bad

    def _parse_good(self, data: bytes) -> Batch | None:
        """A batch of all lines; None if any is bad."""
        import pyarrow as pa

        if not data:
            return self._no_rows()
        try:
            table = _arrow_table(data, self.categories)
        except pa.ArrowInvalid:
            return None
        labels = table.column("label").to_numpy()
        if table.num_rows != Lines(data, "", 1, ()).num_lines or not _zeros_and_ones(labels):
            return None
        features = _hex_features(table) if self.categories == "hex" else _text_features(table)
        if features is None:
            return None
        return Batch(features, _dense(table), labels)

    def _no_rows(self) -> Batch:
        dtype = np.int64 if self.categories == "hex" else object
        features: Features = {name: np.zeros(0, dtype) for name in CATEGORIES}
        return Batch(features, np.zeros((0, len(INTEGERS)), np.float32), np.zeros(0))

    def _good_lines(self, data: bytes, lines: Lines, bad: BadRows) -> list[bytes]:
        pattern = _HEX_LINE if self.categories == "hex" else _STRING_LINE
        good = []
        for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), lines.first_line):
            problem = None if pattern.fullmatch(line) else self._problem(line)
            if problem is None and self.categories == "string":
                problem = _not_utf8(line)
            if problem is None:
                good.append(line)
            else:
                reason, text = problem
                bad.meet(self.on_bad_row, reason, f"{lines.path}, line {number}: {text}")
        return good

    def _problem(self, line: bytes) -> tuple[str, str] | None:
        """Why a line is no row: for counting, and in full."""
        if not line:
            return "blank line", "the line is blank"
        cells = line.decode(errors="backslashreplace").split("\t")
        if len(cells) != len(COLUMNS):
            text = f"expected {len(COLUMNS)} columns, got {len(cells)}"
            return "number of columns", text
        if cells[0] not in ("0", "1"):
            return "label", f"label must be 0 or 1, got {cells[0]!r}"
        for name, cell in zip(INTEGERS, cells[1:14], strict=True):
            if cell and not (_INTEGER.fullmatch(cell) and -(2**63) <= int(cell) < 2**63):
                return "integer", f"column {name} must be an integer or empty, got {cell!r}"
        for name, cell in zip(CATEGORIES, cells[14:], strict=True):
            if self.categories == "hex" and not _HEX.fullmatch(cell):
                text = f"column {name} must be up to 8 hexadecimal digits or empty, got {cell!r}"
                return "category", text
            if "\r" in cell:
                return "category", f"column {name} holds a carriage return, got {cell!r}"
        return None


def _not_utf8(line: bytes) -> tuple[str, str] | None:
    try:
        line.decode()
    except UnicodeDecodeError:
        for name, cell in zip(COLUMNS, line.split(b"\t"), strict=True):
            text = cell.decode(errors="backslashreplace")
            if text.encode() != cell:
                return "category", f"column {name} must be UTF-8, got {text!r}"
    return None


def _arrow_table(data: bytes, categories: Categories) -> Any:
    import pyarrow as pa
    from pyarrow import csv

    from jaxsparse.arrow import reader_of

    category = pa.binary() if categories == "hex" else pa.string()
    types = {"label": pa.int64()} | dict.fromkeys(INTEGERS, pa.int64())
    types |= dict.fromkeys(CATEGORIES, category)
    return csv.read_csv(
        reader_of(data),
        # In one piece: every column becomes one array.
        read_options=csv.ReadOptions(column_names=COLUMNS, block_size=len(data) + 1),
        parse_options=csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
        convert_options=csv.ConvertOptions(
            column_types=types, null_values=[""], strings_can_be_null=False
        ),
    )


def _zeros_and_ones(labels: Array) -> bool:
    # A missing label has made the column float64, with NaN.
    return bool(((labels == 0) | (labels == 1)).all())


def _dense(table: Any) -> npt.NDArray[np.float32]:
    """``[n, 13]`` float32; the logarithm is taken in float64."""
    import pyarrow.compute as pc

    columns = [pc.fill_null(table.column(name), 0).to_numpy() for name in INTEGERS]
    values = np.log1p(np.maximum(np.stack(columns, axis=1), 0))
    return values.astype(np.float32)  # type: ignore[no-any-return]


def _hex_features(table: Any) -> Features | None:
    """Keys of all categories at once; None where a cell is no hexadecimal number."""
    texts, lengths = zip(*(_cells(table.column(name)) for name in CATEGORIES), strict=True)
    text, length = np.concatenate(texts), np.concatenate(lengths)
    present = length > 0
    starts = np.cumsum(length) - length
    values = parse_hex(text, starts[present], length[present])
    if values is None:
        return None
    keys = np.full(len(length), MISSING, np.int64)
    keys[present] = values
    return dict(zip(CATEGORIES, keys.reshape(len(CATEGORIES), -1), strict=True))


def _cells(column: Any) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Bytes of all cells of a binary column, and their lengths."""
    chunk = column.chunk(0)
    _, offsets, text = chunk.buffers()
    edges = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
    data = np.frombuffer(text, np.uint8) if text is not None else np.zeros(0, np.uint8)
    return data[edges[0] : edges[-1]], np.diff(edges).astype(np.int64)


def _text_features(table: Any) -> Features:
    return {name: table.column(name).to_numpy(zero_copy_only=False) for name in CATEGORIES}
