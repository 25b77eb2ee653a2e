# SPDX-License-Identifier: Apache-2.0
"""Columns of any origin as numpy arrays and `Ragged`, exactly, and what a batch may hold."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.key_arrays import key_array, unmasked
from jaxsparse.ragged import Ragged

Array = npt.NDArray[Any]
Float32s = npt.NDArray[np.float32]
Column = Array | Ragged
Columns = dict[str, Column]


def to_columns(data: Any) -> Columns:
    """Columns of a dict, a pandas or polars frame, or anything that speaks Arrow.

    Args:
        data: a mapping of names to numpy arrays, `Ragged`, lists (of lists), series; or a frame.

    Returns:
        Arrays ``[B]`` or ``[B, L]``, and `Ragged` for columns of lists.

    Raises:
        TypeError: ``data`` or a column is of a kind that cannot be read.
        ValueError: a null, or columns of unequal lengths; the message names column and row.

    >>> to_columns({"item": [7, 2**64 - 1], "clicked": [[1, 2], []]})["clicked"].lengths
    array([2, 0])
    """
    if isinstance(data, Mapping):
        for name in data:
            if not isinstance(name, str):
                raise TypeError(f"column names must be str, got {name!r} ({type(name).__name__})")
        columns = {name: _column(name, values) for name, values in data.items()}
    elif hasattr(data, "__arrow_c_stream__"):
        table = _arrow_table(data)
        for name in table.column_names:
            if table.column_names.count(name) > 1:
                raise ValueError(f"two columns are named {name!r}; rename one")
        columns = {
            name: column_from_arrow(name, table.column(index))
            for index, name in enumerate(table.column_names)
        }
    else:
        raise TypeError(
            "data must be a dict of columns or a pandas, polars or pyarrow table, "
            f"got {type(data).__name__}"
        )
    for name, column in columns.items():
        first = next(iter(columns))
        if len(column) != len(columns[first]):
            raise ValueError(
                f"columns must have equal lengths: {name!r} has {len(column)} rows, "
                f"{first!r} has {len(columns[first])}"
            )
    return columns


def column_from_arrow(name: str, column: Any) -> Column:
    """A pyarrow column; lists become `Ragged` (a null list is an empty bag).

    Raises:
        TypeError: a type that holds neither numbers, strings nor lists.
        ValueError: a null; the message names the row.
    """
    import pyarrow as pa

    from jaxsparse.arrow import is_text

    kind = column.type
    if pa.types.is_nested(kind):
        try:
            return Ragged.from_arrow(column)
        except (TypeError, ValueError) as error:
            raise type(error)(f"column {name!r}: {error}") from None
    # Missing floats become NaN, which the roles that take floats refuse by themselves.
    if column.null_count and not pa.types.is_floating(kind):
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise ValueError(f"column {name!r} is null at row {row}; fill or drop such rows first")
    is_dictionary = pa.types.is_dictionary(kind)
    kind = kind.value_type if is_dictionary else kind
    text = is_text(kind)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if not text and not is_number and not pa.types.is_boolean(kind):
        raise TypeError(f"column {name!r} must hold numbers, strings or lists of them, got {kind}")
    values: Array = _decode(column) if is_dictionary else column.to_numpy(zero_copy_only=False)
    return values


def _decode(column: Any) -> Array:
    """A dictionary-encoded column, each chunk with its own dictionary."""
    chunks = column.chunks if hasattr(column, "chunks") else [column]
    parts = [
        # Arrow itself cannot decode the string views of polars.
        chunk.dictionary.to_numpy(zero_copy_only=False)[chunk.indices.to_numpy()]
        for chunk in chunks
    ]
    return np.concatenate(parts) if parts else np.zeros(0, object)


def _arrow_table(data: Any) -> Any:
    import pyarrow as pa

    if type(data).__module__.split(".")[0] == "pandas":
        # A frame that was filtered would bring its index along as one more column.
        return pa.Table.from_pandas(data, preserve_index=False)
    try:
        return pa.table(data)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        kinds = f" with columns of {getattr(data, 'dtypes', 'unknown types')}"
        raise TypeError(f"the table{kinds} cannot be read: {error}") from error


def _column(name: str, values: Any) -> Column:
    if isinstance(values, Ragged):
        return values
    arrow = _arrow_column(name, values)
    if arrow is not None:
        return column_from_arrow(name, arrow)
    unmasked(f"column {name!r}", values)
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise TypeError(f"column {name!r} must be an array or a list, got {type(values).__name__}")
    array = _numbers(values) if isinstance(values, list | tuple) else np.asarray(values)
    if array.ndim == 0:
        raise TypeError(f"column {name!r} must have rows, got the scalar {array}")
    if array.dtype != object or array.ndim != 1:
        return array
    return _object_column(name, array)


def _arrow_column(name: str, values: Any) -> Any:
    """Series, indices and arrays of pandas, polars and arrow as an arrow column; else None."""
    is_pandas = type(values).__module__.split(".")[0] == "pandas"
    is_stream = hasattr(values, "__arrow_c_stream__")
    if not is_pandas and not is_stream and not hasattr(values, "__arrow_c_array__"):
        return None
    import pyarrow as pa

    try:
        if is_pandas:
            import pandas as pd

            # Indices and extension arrays lack what arrow asks of a series.
            return pa.Array.from_pandas(pd.Series(values))
        return pa.chunked_array(values) if is_stream else pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        kind = getattr(values, "dtype", type(values).__name__)
        raise TypeError(f"column {name!r} of type {kind} cannot be read: {error}") from error


def _numbers(values: Any) -> Array:
    if all(isinstance(value, numbers.Real) for value in values) and any(
        isinstance(value, float | np.floating) for value in values
    ):
        return np.asarray(values, np.float64)
    array = key_array(values)
    if array.dtype == object and len(array) and all(isinstance(value, bool) for value in array):
        return array.astype(bool)
    return array


def _object_column(name: str, array: Array) -> Column:
    kinds = set(map(type, array))
    if any(issubclass(kind, list | tuple | np.ndarray | set | frozenset) for kind in kinds):
        # As in an arrow table, no list is an empty one.
        array = array.copy()
        for row, value in enumerate(array.tolist()):
            if value is None:
                array[row] = ()
    only_numbers = all(issubclass(kind, numbers.Real) for kind in kinds)
    for row, value in enumerate(array if not only_numbers else ()):
        # pandas writes a missing string as None or as the float NaN.
        if value is None or isinstance(value, float):
            raise ValueError(
                f"column {name!r} is {value} at row {row}; fill or drop such rows first"
            )
    if any(issubclass(kind, list | tuple | np.ndarray | set | frozenset) for kind in kinds):
        try:
            return Ragged.from_lists(array.tolist())
        except (TypeError, ValueError) as error:
            raise type(error)(f"column {name!r}: {error}") from None
    return _numbers(array.tolist()) if only_numbers else array


def require(columns: Iterable[str], name: str, role: str) -> None:
    """Raises ValueError unless ``name`` is a column; the text lists those there are.

    >>> require(["click", "item"], "clik", "label")
    Traceback (most recent call last):
    ValueError: there is no label column 'clik'; did you mean 'click'? columns are 'click', 'item'
    """
    names = list(columns)
    if name in names:
        return
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    there = ", ".join(map(repr, names)) or "none"
    raise ValueError(f"there is no {role} column {name!r}; {hint}columns are {there}")


def check_keys(name: str, column: Column) -> Column:
    """The column, if it can be a feature.

    Raises:
        ValueError: floats, bools or other objects; the message has the first value and its row.
    """
    keys = column.values if isinstance(column, Ragged) else column
    if keys.dtype.kind in "iuUST" or not keys.size:
        return column
    if keys.dtype.kind == "O":
        for position, value in enumerate(keys.flat):
            if not isinstance(value, str | bytes | int) or isinstance(value, bool):
                raise ValueError(_not_keys(name, column, position, type(value).__name__))
        return column
    raise ValueError(_not_keys(name, column, 0, str(keys.dtype)))


def _not_keys(name: str, column: Column, position: int, kind: str) -> str:
    if isinstance(column, Ragged):
        value = column.values[position]
        row = int(np.searchsorted(column.row_splits, position, side="right")) - 1
    else:
        value, row = column.flat[position], position // max(1, column[0].size)
    hint = "name it in dense=, or cast ids to int64" if "float" in kind else "cast it to int64"
    return (
        f"feature column {name!r} must hold integers or strings, got {kind} ({value} at row "
        f"{row}); {hint}"
    )


def number_column(role: str, name: str, column: Column) -> Float32s:
    """The column as finite float32, ``[B]`` or ``[B, k]``.

    Raises:
        ValueError: no numbers, or NaN or infinity; the message names the row.
    """
    if isinstance(column, Ragged) or column.dtype.kind not in "biuf":
        kind = "lists" if isinstance(column, Ragged) else str(column.dtype)
        raise ValueError(f"{role} column {name!r} must hold numbers, got {kind}")
    with np.errstate(over="ignore"):
        numbers_ = column.astype(np.float32, copy=False)
    finite = np.isfinite(numbers_)
    if not finite.all():
        at = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise ValueError(
            f"{role} column {name!r} is {column[at]} at row {at[0]}; "
            "every value must be a finite float32: fill or drop such rows first"
        )
    return numbers_
