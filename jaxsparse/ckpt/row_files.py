# SPDX-License-Identifier: Apache-2.0
"""What files of keys and vectors of every kind have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

Array = np.ndarray[Any, Any]
Arrays = Callable[[], Iterator[Array]]


class RowFileError(ValueError):
    """A file of rows that cannot be used; the text says where and why."""


class Block(NamedTuple):
    """Some rows of a file."""

    keys: Array | None
    """``[n]`` integers or strings; None where the file has none."""
    vectors: Array
    """``[n, D]`` float32."""
    are_rows: bool = False
    """Whether the keys are row numbers of the table."""


class Format(Protocol):
    """One kind of file."""

    def read(self, path: Path, block_rows: int, string_keys: bool) -> Iterator[Block]:
        """The file's rows in order."""
        ...

    def write(
        self, path: Path, keys: Arrays, vectors: Arrays, shape: tuple[int, int], are_rows: bool
    ) -> None:
        """Writes a file; ``keys`` and ``vectors`` give the same blocks each time."""
        ...


class Stored(NamedTuple):
    """An array inside a file: its shape, and a function that reads its next rows."""

    shape: tuple[int, ...]
    next_rows: Callable[[int], Array]


def blocks_of(path: Path, arrays: dict[str, Stored], block_rows: int) -> Iterator[Block]:
    """Blocks of the arrays ``vectors`` and ``keys`` or ``rows``."""
    if "vectors" not in arrays:
        raise RowFileError(f"{path}: no array 'vectors'; it has {sorted(arrays)}")
    name = next((name for name in ("keys", "rows") if name in arrays), None)
    vectors = arrays["vectors"]
    if len(vectors.shape) != 2:
        raise RowFileError(f"{path}: vectors must be [n, D], got {list(vectors.shape)}")
    if name is not None and arrays[name].shape != vectors.shape[:1]:
        raise RowFileError(
            f"{path}: {name} must be [{vectors.shape[0]}], got {list(arrays[name].shape)}"
        )
    for start in range(0, vectors.shape[0], block_rows):
        count = min(block_rows, vectors.shape[0] - start)
        keys = None if name is None else arrays[name].next_rows(count)
        yield Block(keys, vectors.next_rows(count).astype(np.float32), name == "rows")


def rows_reader(path: Path, file: IO[bytes], dtype: Any, row_shape: tuple[int, ...]) -> Any:
    """A function that reads the next rows of an array whose bytes begin here."""

    def next_rows(count: int) -> Array:
        size = count * math.prod(row_shape) * int(dtype.itemsize)
        data = file.read(size)
        if len(data) != size:
            raise RowFileError(f"{path}: ends too early; is it complete?")
        return np.frombuffer(data, dtype).reshape(count, *row_shape)

    return next_rows
