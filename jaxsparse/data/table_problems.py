# SPDX-License-Identifier: Apache-2.0
"""Which rows of an arrow table cannot be used, and why: looked for once something failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.data.schema import ColumnSchema, FeatureColumn
from jaxsparse.data.tables import filled

Bools = npt.NDArray[np.bool_]
Problem = tuple[int, str, str]
"""Row of the table, reason for counting, and the whole text."""


def split_bad_rows(table: Any, schema: ColumnSchema) -> tuple[Any, list[Problem]]:
    """The table without its bad rows, and the first problem of each of these, in order.

    A column that is wrong as a whole, such as floats as keys, makes no row bad.
    """
    bad = np.zeros(table.num_rows, bool)
    found: list[Problem] = []
    for name, role, expected, wrong in _checks(table, schema):
        for row in np.flatnonzero(wrong & ~bad):
            value = table.column(name)[int(row)].as_py()
            reason = f"{role} column {name!r} must be {expected}"
            found.append((int(row), reason, f"{reason}, got {'null' if value is None else value}"))
        bad |= wrong
    return table.filter(_arrow(~bad)), sorted(found)


def _checks(table: Any, schema: ColumnSchema) -> Iterator[tuple[str, str, str, Bools]]:
    """Column, role, what its values must be, and which rows are not."""
    roles = schema.roles()
    binary = schema.label_kind == "binary"
    for role in ("label", "dense", "weight"):
        for name in roles[role]:
            numbers = _numbers(table.column(name))
            if numbers is None:
                continue
            wrong, expected = ~np.isfinite(numbers), "a finite number"
            if role == "label" and binary:
                wrong, expected = (numbers != 0) & (numbers != 1), "0 or 1"
            elif role == "weight":
                wrong, expected = wrong | (numbers < 0), "a number >= 0"
            yield name, role, expected, wrong
    for feature in schema.feature_columns().values():
        name = str(feature.column)
        expected, wrong = _wrong_keys(table.column(name), feature)
        yield name, "feature", expected, wrong


def _numbers(column: Any) -> npt.NDArray[np.float32] | None:
    import pyarrow.types as types

    kind = column.type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        return None
    values = column.to_numpy(zero_copy_only=False)
    if values.dtype == object:
        values = np.array([np.nan if value is None else value for value in values], np.float64)
    with np.errstate(over="ignore"):
        numbers: npt.NDArray[np.float32] = values.astype(np.float32)
    return numbers


def _wrong_keys(column: Any, feature: FeatureColumn) -> tuple[str, Bools]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_nested(column.type):
        return "keys without nulls", _with_null_inside(column)
    if feature.missing is not None:
        column = filled(column, feature.missing)
    is_null = _mask(pc.is_null(column))
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    if not is_text or feature.type == "string" or feature.separator is not None:
        return "a key", is_null
    pattern = pc.match_substring_regex(column, "^-?[0-9]{1,18}$")
    wrong = ~_mask(pc.fill_null(pattern, False))
    for row in np.flatnonzero(wrong & ~is_null):
        text = column[int(row)].as_py()
        digits = text.removeprefix("-")
        wrong[row] = not (digits.isascii() and digits.isdigit() and -(2**63) <= int(text) < 2**64)
    return "an integer of 64 bits", wrong


def _with_null_inside(column: Any) -> Bools:
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = [np.zeros(0, bool)]
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        lengths = pc.list_value_length(chunk).fill_null(0).to_numpy(zero_copy_only=False)
        of_row = np.repeat(np.arange(len(chunk)), lengths.astype(np.int64))
        wrong = np.zeros(len(chunk), bool)
        wrong[of_row[_mask(chunk.flatten().is_null())]] = True
        parts.append(wrong)
    return np.concatenate(parts)


def _mask(column: Any) -> Bools:
    mask: Bools = column.to_numpy(zero_copy_only=False).astype(bool)
    return mask


def _arrow(mask: Bools) -> Any:
    import pyarrow as pa

    return pa.array(mask)
