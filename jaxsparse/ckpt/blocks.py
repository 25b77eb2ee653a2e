# SPDX-License-Identifier: Apache-2.0
"""Arrays of any size on disk, written and read in blocks: zarr 3 through tensorstore.

Uncompressed, with a crc32c in every block of 16 MB: a flipped, cut or missing block is an error,
never zeros.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from jaxsparse.ckpt.errors import DamagedError

BLOCK_BYTES = 16 * 2**20
"""Of a block: the disk's full speed (smaller ones cost a file each), and little memory."""

IN_FLIGHT = 4
"""Blocks being written at a time."""

CACHE_BYTES = 4 * BLOCK_BYTES
"""Of blocks just read: windows of another mesh do not end where blocks do."""

Array = np.ndarray[Any, Any]


def block_rows(row_shape: tuple[int, ...], dtype: Any, num_rows: int) -> int:
    """Rows of a block."""
    row_bytes = math.prod(row_shape) * int(np.dtype(dtype).itemsize)
    return max(1, min(num_rows, BLOCK_BYTES // max(1, row_bytes)))


def _spec(path: Path) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        # Without the first, blocks of zeros are not written; without the second, blocks that are
        # not there read as zeros.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


class ArrayWriter:
    """An array that is written block after block; syncing is left to `publish`."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: Any, block: int) -> None:
        """Makes the array.

        Args:
            path: of a folder, made here.
            shape: ``[n, ...]``.
            dtype: of the array.
            block: rows of a block.

        Raises:
            ValueError: from tensorstore, such as a full disk.
        """
        metadata = {
            "shape": shape,
            "data_type": np.dtype(dtype).name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [block, *shape[1:]]},
            },
            # Blocks lie beside the header, not in folders of their own.
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
        }
        context = ts.Context({"file_io_sync": False})
        spec = {**_spec(path), "metadata": metadata}
        self._store = ts.open(spec, create=True, context=context).result()
        self._writes: deque[Any] = deque()
        self._start = 0

    def write(self, block: Array) -> None:
        """Writes the next block; it may not change before `finish`.

        Raises:
            ValueError: from tensorstore; maybe of a block before it.
        """
        self._writes.append(self._store[self._start : self._start + len(block)].write(block))
        self._start += len(block)
        if len(self._writes) == IN_FLIGHT:
            self._writes.popleft().result()

    def finish(self) -> None:
        """Waits for all blocks.

        Raises:
            ValueError: from tensorstore.
        """
        while self._writes:
            self._writes.popleft().result()


def write_array(path: Path, shape: tuple[int, ...], dtype: Any, blocks: Iterable[Array]) -> None:
    """Writes an array, block after block; syncing is left to `publish`.

    Args:
        path: of a folder, made here.
        shape: ``[n, ...]``.
        dtype: of the array.
        blocks: all its rows in order, `block_rows` at a time.

    Raises:
        ValueError: from tensorstore, such as a full disk.
    """
    writer = ArrayWriter(path, shape, dtype, block_rows(shape[1:], dtype, shape[0]))
    for block in blocks:
        writer.write(block)
    writer.finish()


class ArrayReader:
    """Rows of an array that `write_array` wrote in one or several parts, one after another."""

    def __init__(self, path: Path, starts: list[int], shape: list[int], dtype: Any) -> None:
        """Opens the parts.

        Args:
            path: of the folder that holds them, each named by its first row.
            starts: first row of each part, ascending from 0.
            shape: of the whole array.
            dtype: of the whole array.

        Raises:
            DamagedError: a part is missing or is not what it should be.
        """
        self.path = path
        stops = [*starts[1:], shape[0]]
        self._parts: list[tuple[int, int, Any]] = []
        context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
        for start, stop in zip(starts, stops, strict=True):
            part = path / str(start)
            try:
                store = ts.open(_spec(part), open=True, context=context).result()
            except ValueError as error:
                raise unreadable(part, error) from error
            got = (list(store.shape), store.dtype.name)
            if got != ([stop - start, *shape[1:]], np.dtype(dtype).name):
                raise DamagedError(f"{part}: is {got[1]}{got[0]}, not what the manifest says")
            self._parts.append((start, stop, store))

    def read_into(self, out: Array, first: int) -> list[tuple[Path, Any]]:
        """Starts reading rows ``first ..`` into ``out``; see `finish_reads`."""
        last = first + len(out)
        return [
            (
                self.path / str(start),
                ts.array(out[max(start, first) - first : min(stop, last) - first]).write(
                    store[max(start, first) - start : min(stop, last) - start]
                ),
            )
            for start, stop, store in self._parts
            if start < last and first < stop
        ]


def finish_reads(reads: Iterable[tuple[Path, Any]]) -> None:
    """Waits for reads.

    Raises:
        DamagedError: a block is missing, cut or damaged; the text names the array.
    """
    for path, read in reads:
        try:
            read.result()
        except ValueError as error:
            raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> DamagedError:
    """The error for a file that tensorstore or orbax could not read."""
    reason = str(error).split(" [")[0]
    return DamagedError(f"{path}: cannot be read, is it damaged or incomplete? ({reason})")
