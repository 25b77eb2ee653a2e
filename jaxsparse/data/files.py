# SPDX-License-Identifier: Apache-2.0
"""Columns out of CSV (plain or gzipped) and Parquet files, through pyarrow, exactly."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from jaxsparse.data.arrays import ArrayDataset, from_arrays
from jaxsparse.data.cells import raise_first_problem, read_header
from jaxsparse.data.columns import (
    Array,
    Column,
    Columns,
    check_keys,
    column_from_arrow,
    number_column,
    require,
)
from jaxsparse.data.schema import ColumnSchema, DataError, FeatureColumn
from jaxsparse.key_arrays import concatenate_keys
from jaxsparse.ragged import Ragged

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]


def from_files(
    paths: Paths,
    schema: ColumnSchema,
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
) -> ArrayDataset:
    """A dataset of the rows of files, held in memory; see `read_files` and `from_arrays`."""
    return from_arrays(
        read_files(paths, schema),
        batch_size,
        label=schema.label,
        dense=schema.dense,
        weight=schema.weight,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


def read_files(paths: Paths, schema: ColumnSchema) -> Columns:
    """Reads the columns a schema names, from files one after another.

    Args:
        paths: one or several of ``.csv``, ``.csv.gz``, ``.tsv``, ``.tsv.gz``, ``.parquet``. CSV
            files have a header; a file without rows adds none.
        schema: which columns, and what they hold.

    Returns:
        Features by their own names (``[n]`` integers or strings, or `Ragged`), then label, weight
        and dense columns by the columns' names (``[n]`` float32).

    Raises:
        DataError: a file is missing, empty or broken; a column is missing; a line has a wrong
            number of cells; a label is not 0 or 1, a key no integer, a dense value not finite, or
            anything null. The text names the file, the line (CSV, the header is line 1) or row
            (Parquet, the first is row 0), the column and the value.
    """
    files = [paths] if isinstance(paths, str | PathLike) else list(paths)
    if not files:
        raise DataError("no data files are given")
    parts = [_read_file(Path(path), schema) for path in files]
    columns = {name: _join(name, [part[name] for part in parts]) for name in parts[0]}
    if not len(columns[schema.label]):
        raise DataError(f"{', '.join(map(str, files))}: there are no rows")
    return columns


def _read_file(path: Path, schema: ColumnSchema) -> Columns:
    kinds: dict[str, Callable[[Path, ColumnSchema], Columns]] = {
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".parquet": _read_parquet,
    }
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if suffix not in kinds or (path.suffix == ".gz" and suffix == ".parquet"):
        raise DataError(
            f"{path}: unknown kind of file; known are .csv, .csv.gz, .tsv, .tsv.gz and .parquet"
        )
    if not path.exists():
        raise DataError(f"{path}: no such file")
    if not path.is_file():
        raise DataError(f"{path}: not a file")
    if not path.stat().st_size:
        raise DataError(f"{path}: the file is empty")
    try:
        return kinds[suffix](path, schema)
    except DataError:
        raise
    except (OSError, EOFError) as error:
        size = path.stat().st_size
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"{path}: cannot be read: {reason} (the file has {size} bytes; is it complete?)"
        ) from error
    except (
        TypeError,
        ValueError,
        csv.Error,
        zlib.error,
    ) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise DataError(f"{path}: {error}") from error


def _read_csv(path: Path, schema: ColumnSchema) -> Columns:
    _require_all(read_header(path, schema.delimiter), schema)
    try:
        return _to_columns(_csv_table(path, schema), schema)
    except (TypeError, ValueError):
        raise_first_problem(path, schema)
        raise


def _csv_table(path: Path, schema: ColumnSchema) -> Any:
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    roles = schema.roles()
    types = {name: pa.string() for name in roles.pop("feature")}
    types |= {name: pa.float64() for names in roles.values() for name in names}
    return arrow_csv.read_csv(
        path,
        parse_options=arrow_csv.ParseOptions(delimiter=schema.delimiter),
        # No text stands for null: an empty cell is an error in a column of numbers.
        convert_options=arrow_csv.ConvertOptions(
            column_types=types, include_columns=list(types), null_values=[]
        ),
    )


def _read_parquet(path: Path, schema: ColumnSchema) -> Columns:
    import pyarrow as pa
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        _require_all(file.schema_arrow.names, schema)
        names = list({name for names in schema.roles().values() for name in names})
        # Row groups stay chunks of their own: nothing adds up their 32-bit offsets.
        groups = [file.read_row_group(i, columns=names) for i in range(file.num_row_groups)]
        table = pa.concat_tables(groups) if groups else file.schema_arrow.empty_table()
    return _to_columns(table, schema)


def _require_all(names: Sequence[str], schema: ColumnSchema) -> None:
    for role, columns in schema.roles().items():
        for column in columns:
            require(names, column, role)


def _to_columns(table: Any, schema: ColumnSchema) -> Columns:
    columns: Columns = {
        name: _keys(table.column(feature.column), feature)
        for name, feature in schema.feature_columns().items()
    }
    for role in ("label", "weight", "dense"):
        for name in schema.roles()[role]:
            numbers = number_column(role, name, column_from_arrow(name, table.column(name)))
            columns[name] = numbers
            if role == "label" and schema.label_kind == "binary":
                _refuse(name, numbers, (numbers != 0) & (numbers != 1), "label", "0 or 1")
            if role == "weight":
                _refuse(name, numbers, numbers < 0, "weight", ">= 0")
    return columns


def _refuse(name: str, values: Array, wrong: Array, role: str, expected: str) -> None:
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"{role} column {name!r} must be {expected}, got {values[row]} at row {row}"
        )


def _keys(column: Any, feature: FeatureColumn) -> Column:
    """Keys of a feature: integers, strings, or bags of them."""
    import pyarrow as pa

    name = str(feature.column)
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    if is_text and feature.separator is not None:
        return _split(column, feature)
    if is_text and feature.type == "integer" and not column.null_count:
        return _integers(name, column)
    keys = check_keys(name, column_from_arrow(name, column))
    kind = (keys.values if isinstance(keys, Ragged) else keys).dtype.kind
    if len(keys) and (kind in "iu") != (feature.type == "integer"):
        held = "integer" if kind in "iu" else "string"
        raise ValueError(f'feature column {name!r} holds {held}s; say type = "{held}"')
    return keys


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

    # Arrow would read 0x10 as 16.
    kinds = () if pc.any(pc.match_substring(text, "x")).as_py() else (pa.int64(), pa.uint64())
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
        'strings need type = "string"'
    )


def _join(name: str, parts: list[Column]) -> Column:
    try:
        if any(isinstance(part, Ragged) for part in parts):
            bags = [part for part in parts if isinstance(part, Ragged)]
            if len(bags) < len(parts):
                raise TypeError("some files hold lists and others single keys")
            return Ragged.concatenate([Ragged.from_lengths(*same) for same in _widened(bags)])
        arrays = [part for part in parts if not isinstance(part, Ragged)]
        return concatenate_keys(_common(arrays))
    except TypeError as error:
        raise DataError(f"column {name!r} differs between the files: {error}") from error


def _widened(bags: list[Ragged]) -> list[tuple[Array, Array]]:
    values = _common([bag.values for bag in bags])
    return [(value, bag.lengths) for value, bag in zip(values, bags, strict=True)]


def _common(arrays: list[Array]) -> list[Array]:
    """Signed keys beside unsigned ones become unsigned where none is negative."""
    if {array.dtype.kind for array in arrays} != {"i", "u"}:
        return arrays
    if any(array.size and array.min() < 0 for array in arrays):
        return arrays
    return [array.astype(np.uint64) for array in arrays]
