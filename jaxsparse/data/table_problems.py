# SPDX-License-Identifier: Apache-2.0
"""Which rows of an arrow table cannot be used, and why: looked for once something failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.data.cells import keys_check, not_an_integer
from jaxsparse.data.schema import ColumnSchema, FeatureColumn
from jaxsparse.data.tables import filled

Bools = npt.NDArray[np.bool_]
Problem = tuple[int, str, str]
"""Row of the table, reason for counting, and the whole text."""


def split_bad_rows(table: Any, schema: ColumnSchema) -> tuple[Any, list[Problem]]:
    """The table without its bad rows, and the first problem of each of these, in order.

    A column that is wrong as a whole, such as floats as keys, makes no row bad.
    """
    import pyarrow as pa

    bad = np.zeros(table.num_rows, bool)
    found: list[Problem] = []
    for name, role, expected, wrong in _checks(table, schema):
        for row in np.flatnonzero(wrong & ~bad):
            value = table.column(name)[int(row)].as_py()
            reason = f"{role} column {name!r} must be {expected}"
            found.append((int(row), reason, f"{reason}, got {'null' if value is None else value}"))
        bad |= wrong
    return _without_views(table).filter(pa.array(~bad)), sorted(found)


def _without_views(table: Any) -> Any:
    """Views of text as plain text: arrow cannot filter the former."""
    import pyarrow.types as types

    from jaxsparse.arrow import decoded_text

    for index, field in enumerate(table.schema):
        if types.is_string_view(field.type):
            table = table.set_column(index, field.name, decoded_text(table.column(index)))
    return table


def _checks(table: Any, schema: ColumnSchema) -> Iterator[tuple[str, str, str, Bools]]:
    """Column, role, what its values must be, and which rows are not."""
    roles = schema.roles()
    binary = schema.label_kind == "binary"
    for role in ("label", "dense", "weight"):
        for name in roles[role]:
            numbers = _numbers(table.column(name))
            if numbers is None:
                continue
            with np.errstate(over="ignore"):
                wrong, expected = ~np.isfinite(numbers.astype(np.float32)), "a finite number"
            if role == "label" and binary:
                wrong, expected = (numbers != 0) & (numbers != 1), "0 or 1"
            elif role == "weight":
                wrong, expected = wrong | (numbers < 0), "a number >= 0"
            yield name, role, expected, wrong
    for feature in schema.feature_columns().values():
        name, column = str(feature.column), table.column(str(feature.column))
        for expected, wrong in _wrong_keys(column, feature):
            yield name, "feature", expected, wrong


def _numbers(column: Any) -> npt.NDArray[np.float64] | None:
    import pyarrow.types as types

    kind = column.type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        return None
    values = column.to_numpy(zero_copy_only=False)
    if values.dtype == object:
        values = np.array([np.nan if value is None else value for value in values], np.float64)
    numbers: npt.NDArray[np.float64] = values.astype(np.float64)
    return numbers


def _wrong_keys(column: Any, feature: FeatureColumn) -> Iterator[tuple[str, Bools]]:
    import pyarrow as pa
    import pyarrow.compute as pc

    from jaxsparse.arrow import decoded_text

    if pa.types.is_nested(column.type):
        yield "keys without nulls", _with_a_key(column, lambda keys: _mask(keys.is_null()))
        if feature.limit is not None:
            limits = f"keys in 0..{feature.limit - 1}"
            yield limits, _with_a_key(column, partial(_beyond, feature.limit))
        return
    column = decoded_text(column)
    if feature.missing is not None:
        column = filled(column, feature.missing)
    is_null = _mask(pc.is_null(column))
    yield "a key", is_null
    if _is_text(column.type) and feature.separator is not None:
        check = keys_check(feature)
        cells = column.to_pylist()
        wrong = np.array([cell is not None and check(cell) is not None for cell in cells], bool)
        yield f"{feature.type} keys between {feature.separator!r}", wrong
        return
    if _is_text(column.type) and feature.type == "integer" and feature.separator is None:
        wrong = _not_integers(column) & ~is_null
        yield "an integer of 64 bits", wrong
        column = pc.if_else(pa.array(~wrong), column, None)
    if feature.limit is not None and feature.separator is None:
        yield f"in 0..{feature.limit - 1}", _beyond(feature.limit, column)


def _is_text(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _not_integers(column: Any) -> Bools:
    """Which texts are no integers of 64 bits, nulls included."""
    import pyarrow.compute as pc

    short = pc.match_substring_regex(column, "^-?[0-9]{1,18}$")
    wrong = ~_mask(pc.fill_null(short, False))
    for row in np.flatnonzero(wrong):
        text = column[int(row)].as_py() or ""
        wrong[row] = not_an_integer(text) is not None
    return wrong


def _beyond(limit: int, column: Any) -> Bools:
    """Which keys are integers outside of 0..limit - 1; nulls are not."""
    keys = column.to_pylist()
    if not all(key is None or isinstance(key, int) or _is_text(column.type) for key in keys):
        return np.zeros(len(column), bool)
    return np.array([key is not None and not 0 <= int(key) < limit for key in keys], bool)


def _with_a_key(column: Any, find: Callable[[Any], Bools]) -> Bools:
    """Which lists hold a key that ``find`` finds in flat keys."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = [np.zeros(0, bool)]
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        lengths = pc.list_value_length(chunk).fill_null(0).to_numpy(zero_copy_only=False)
        of_row = np.repeat(np.arange(len(chunk)), lengths.astype(np.int64))
        wrong = np.zeros(len(chunk), bool)
        wrong[of_row[find(chunk.flatten())]] = True
        parts.append(wrong)
    return np.concatenate(parts)


def _mask(column: Any) -> Bools:
    mask: Bools = column.to_numpy(zero_copy_only=False).astype(bool)
    return mask
