# SPDX-License-Identifier: Apache-2.0
"""Columns of numbers, written as they come to a Parquet or CSV file."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxsparse.config import ConfigError
from jaxsparse.train.signals import on_sigterm

KINDS = (".parquet", ".csv")


def check_table_file(path: Path) -> None:
    """Raises where `write_table` could not write.

    Raises:
        ConfigError: the ending is unknown, or there is no such folder.
    """
    if path.suffix not in KINDS:
        raise ConfigError(f"--out: expected a file ending in {' or '.join(KINDS)}, got {path}")
    if not path.parent.is_dir():
        raise ConfigError(f"--out: {path.parent} is no folder")
    if path.is_dir():
        raise ConfigError(f"--out: {path} is a folder")


def write_table(path: Path, parts: Iterable[Mapping[str, np.ndarray[Any, Any]]]) -> int:
    """Writes parts of equal columns one after another; the file is there when all of them are.

    Returns:
        How many rows were written.

    Raises:
        ConfigError: the file cannot be written.
        KeyboardInterrupt: SIGTERM came; nothing unfinished is left.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    # A name of its own: whatever ends with .tmp may be the user's.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    writer: Any = None
    num_rows = 0
    with on_sigterm(_end):
        try:
            for part in parts:
                table = pa.table(dict(part))
                if writer is None:
                    kind = csv.CSVWriter if path.suffix == ".csv" else parquet.ParquetWriter
                    writer = kind(temporary, table.schema)
                writer.write_table(table)
                num_rows += table.num_rows
            if writer is None:
                raise ConfigError("predict: there are no rows")
            writer.close()
            os.replace(temporary, path)
        except OSError as error:
            raise ConfigError(
                f"--out: {path} cannot be written: {error.strerror or error}"
            ) from error
        finally:
            with contextlib.suppress(OSError):  # it is told of above
                temporary.unlink()
    return num_rows


def _end() -> None:
    raise KeyboardInterrupt("ended by SIGTERM")
