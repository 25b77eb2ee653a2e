# SPDX-License-Identifier: Apache-2.0
"""Columns out of CSV (plain or gzipped) and Parquet files, through pyarrow, exactly."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Callable
from os import PathLike
from pathlib import Path

from jaxsparse.data.arrays import ArrayDataset, from_arrays
from jaxsparse.data.cells import raise_first_problem, read_header
from jaxsparse.data.columns import Columns
from jaxsparse.data.joining import join_columns
from jaxsparse.data.schema import ColumnSchema, DataError
from jaxsparse.data.sources import Paths
from jaxsparse.data.tables import csv_table, require_all, table_columns


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
    _require_label(schema)
    return from_arrays(
        read_files(paths, schema),
        batch_size,
        label=str(schema.label),
        dense=schema.dense,
        weight=schema.weight,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


def _require_label(schema: ColumnSchema) -> None:
    if schema.label is None:
        raise DataError("the schema names no label column; stream_files reads data without labels")


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
    _require_label(schema)
    files = [paths] if isinstance(paths, str | PathLike) else list(paths)
    if not files:
        raise DataError("no data files are given")
    parts = [_read_file(Path(path), schema) for path in files]
    origins = list(map(str, files))
    columns = {
        name: join_columns(name, [part[name] for part in parts], origins) for name in parts[0]
    }
    if not len(columns[str(schema.label)]):
        raise DataError(f"{', '.join(map(str, files))}: there are no rows")
    return columns


def _read_file(path: Path, schema: ColumnSchema) -> Columns:
    kinds: dict[str, Callable[[Path, ColumnSchema], Columns]] = {
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".parquet": _read_parquet,
    }
    is_gzipped = path.suffix.lower() == ".gz"
    suffix = (path.with_suffix("") if is_gzipped else path).suffix.lower()
    if suffix not in kinds or (is_gzipped and suffix == ".parquet"):
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
    require_all(read_header(path, schema.delimiter), schema)
    import pyarrow as pa

    try:
        # Arrow itself knows a gzipped file by small letters only.
        with pa.input_stream(path, "gzip" if path.suffix.lower() == ".gz" else None) as stream:
            return table_columns(csv_table(stream, schema), schema)
    except (TypeError, ValueError):
        raise_first_problem(path, schema)
        raise


def _read_parquet(path: Path, schema: ColumnSchema) -> Columns:
    import pyarrow as pa
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        require_all(file.schema_arrow.names, schema)
        names = list({name for names in schema.roles().values() for name in names})
        # Row groups stay chunks of their own: nothing adds up their 32-bit offsets.
        groups = [file.read_row_group(i, columns=names) for i in range(file.num_row_groups)]
        table = pa.concat_tables(groups) if groups else file.schema_arrow.empty_table()
    return table_columns(table, schema)
