# SPDX-License-Identifier: Apache-2.0
"""Arrow tables as the columns a schema names: checked, and exact to the last bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxsparse.data.batch import Batch
from jaxsparse.data.columns import (
    Array,
    Column,
    Columns,
    check_keys,
    column_from_arrow,
    number_column,
    require,
)
from jaxsparse.data.schema import ColumnSchema, FeatureColumn, hint_at_keys
from jaxsparse.ragged import Ragged


def require_all(names: Iterable[str], schema: ColumnSchema) -> None:
    """Raises ValueError unless every column the schema reads is among ``names``, and once."""
    names = list(names)
    for role, columns in schema.roles().items():
        for column in columns:
            require(names, column, role)
            if names.count(column) > 1:
                raise ValueError(f"there are {names.count(column)} columns {column!r}; rename one")


def csv_types(schema: ColumnSchema) -> dict[str, Any]:
    """Arrow types the columns of a CSV file are read as: keys as text, the others as float64."""
    import pyarrow as pa

    roles = schema.roles()
    types = {name: pa.string() for name in roles.pop("feature")}
    return types | {name: pa.float64() for names in roles.values() for name in names}


def csv_table(
    source: Any, schema: ColumnSchema, *, num_bytes: int = 0, header: tuple[str, ...] = ()
) -> Any:
    """The columns a schema reads, as an arrow table of text and float64.

    Args:
        source: path, or arrow's reader of a buffer.
        schema: which columns.
        num_bytes: read in pieces of so many; 0 is arrow's choice.
        header: names of the columns, where ``source`` has none.
    """
    from pyarrow import csv

    types = csv_types(schema)
    return csv.read_csv(
        source,
        read_options=csv.ReadOptions(
            column_names=header or None, block_size=num_bytes + 1 if num_bytes else None
        ),
        parse_options=csv.ParseOptions(
            delimiter=schema.delimiter, newlines_in_values=bool(num_bytes)
        ),
        # No text stands for null: an empty cell is an error in a column of numbers.
        convert_options=csv.ConvertOptions(
            column_types=types, include_columns=list(types), null_values=[]
        ),
    )


def table_columns(table: Any, schema: ColumnSchema) -> Columns:
    """Features by their names, then label, weight and dense columns, as numpy arrays.

    Raises:
        ValueError: a value cannot be what its column is; the message has its row.
        TypeError: a column of a wrong kind.
    """
    columns: Columns = {
        name: _keys(table.column(feature.column), feature)
        for name, feature in schema.feature_columns().items()
    }
    for role in ("label", "weight", "dense"):
        for name in schema.roles()[role]:
            read = column_from_arrow(name, table.column(name))
            columns[name] = number_column(role, name, read)
            # Looked at before it is rounded to float32, which makes 1 of 0.99999999999.
            exact = np.asarray(read, np.float64)
            if role == "label" and schema.label_kind == "binary":
                _refuse(name, exact, (exact != 0) & (exact != 1), "label", "0 or 1")
            if role == "weight":
                _refuse(name, exact, exact < 0, "weight", ">= 0")
    return columns


def table_batch(table: Any, schema: ColumnSchema) -> Batch:
    """The same as a batch."""
    columns = table_columns(table, schema)
    dense = [columns[name] for name in schema.dense]
    return Batch(
        features={name: columns[name] for name in schema.features},
        dense=np.column_stack(dense) if dense else None,  # type: ignore[arg-type]
        labels=np.zeros(table.num_rows) if schema.label is None else columns[schema.label],
        weights=None if schema.weight is None else columns[schema.weight],  # type: ignore[arg-type]
    )


def _refuse(name: str, values: Array, wrong: Array, role: str, expected: str) -> None:
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"{role} column {name!r} must be {expected}, got {values[row]} at row {row}"
        )


def _keys(column: Any, feature: FeatureColumn) -> Column:
    """Keys of a feature: integers, strings, or bags of them."""
    keys = _any_keys(column, feature)
    if feature.limit is not None:
        values = keys.values if isinstance(keys, Ragged) else keys
        outside = beyond(values, feature.limit)
        if outside.any():
            value = values[int(outside.argmax())]
            raise ValueError(
                f"feature column {feature.column!r} must be in 0..{feature.limit - 1}, got {value}"
            )
    return keys


def beyond(keys: Array, limit: int) -> Array:
    """Which integers are not in 0..limit - 1."""
    # Compared in their own signedness: beside int64, uint64 would become float64.
    return (keys < 0) | (keys >= min(limit, int(np.iinfo(keys.dtype).max) + 1))


def _any_keys(column: Any, feature: FeatureColumn) -> Column:
    import pyarrow as pa

    from jaxsparse.arrow import decoded_text, is_text

    name = str(feature.column)
    splits = feature.separator is not None
    if splits or feature.type == "integer" or feature.missing is not None:
        column = decoded_text(column)
    if feature.missing is not None:
        column = filled(column, feature.missing)
    if splits and feature.type == "string" and pa.types.is_nested(column.type):
        raise ValueError(
            f"feature column {name!r} holds {column.type}, whose lists need no separator; "
            "leave it out"
        )
    if (splits or feature.type == "integer") and not column.null_count:
        if pa.types.is_large_string(column.type) or pa.types.is_string(column.type):
            return _split(column, feature) if splits else _integers(name, column)
        if is_text(column.type):
            raise ValueError(f"feature column {name!r} holds bytes that are no UTF-8")
    keys = check_keys(name, column_from_arrow(name, column))
    kind = (keys.values if isinstance(keys, Ragged) else keys).dtype.kind
    if len(keys) and (kind in "iu") != (feature.type == "integer"):
        held = "integer" if kind in "iu" else "string"
        raise ValueError(f'feature column {name!r} holds {held}s; say type = "{held}"')
    return keys


def filled(column: Any, missing: int | str) -> Any:
    """A column with ``missing`` in place of nulls and of empty text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_nested(kind):
        return column
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
        column = column.cast(kind)
    if pa.types.is_integer(kind):
        # The key may be beyond the values of a narrow column.
        wide = pa.uint64() if kind == pa.uint64() else pa.int64()
        return pc.fill_null(column.cast(wide), pa.scalar(missing, wide))
    column = pc.fill_null(column, str(missing))
    return pc.if_else(pc.equal(column, ""), str(missing), column)


def _split(column: Any, feature: FeatureColumn) -> Ragged:
    """Bags out of cells of text; no key is between two separators that touch."""
    import pyarrow.compute as pc

    lists = pc.split_pattern(column, feature.separator)
    is_empty = pc.equal(column, "").to_numpy(zero_copy_only=False).astype(bool)
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    # Splitting "" gives one "".
    items = pc.list_flatten(lists).filter(np.repeat(~is_empty, lengths))
    if pc.any(pc.equal(items, "")).as_py():
        raise ValueError(f"feature column {feature.column!r} has an empty key in a list")
    keys = (
        _integers(str(feature.column), items)
        if feature.type == "integer"
        else items.to_numpy(zero_copy_only=False)
    )
    return Ragged.from_lengths(keys, np.where(is_empty, 0, lengths))


def _integers(name: str, text: Any) -> Array:
    """int64, or uint64 if only that holds all of them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    # Arrow would read 0x10 and 0X10 as 16.
    has_x = any(pc.any(pc.match_substring(text, x)).as_py() for x in "xX")
    kinds = () if has_x else (pa.int64(), pa.uint64())
    for kind in kinds:
        try:
            keys: Array = pc.cast(text, kind).to_numpy(zero_copy_only=False)
        except pa.ArrowInvalid:
            continue
        return keys
    wrong = pc.invert(pc.match_substring_regex(text, "^-?[0-9]+$"))
    wrong = wrong.to_numpy(zero_copy_only=False).astype(bool)
    if not wrong.any():
        raise ValueError(
            f"feature column {name!r} must hold integers of 64 bits, all signed or all unsigned"
        )
    row = int(wrong.argmax())
    raise ValueError(
        f"feature column {name!r} must hold integers, got {text[row]} at row {row}; "
        f"{hint_at_keys(str(text[row]))}"
    )
