# SPDX-License-Identifier: Apache-2.0
"""npz, safetensors, Parquet and text: each read and written a block at a time."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from jaxsparse.ckpt.row_files import (
    Array,
    Arrays,
    Block,
    Format,
    RowFileError,
    Stored,
    blocks_of,
    rows_reader,
)


def open_format(path: Path) -> Format:
    """The kind of a file by its ending.

    Raises:
        RowFileError: none of ours.
    """
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    kinds: dict[str, Format] = {
        ".npz": Npz(),
        ".safetensors": Safetensors(),
        ".parquet": Parquet(),
        ".txt": Text(),
        ".tsv": Text(),
    }
    if suffix not in kinds or (path.suffix == ".gz" and not isinstance(kinds[suffix], Text)):
        raise RowFileError(
            f"{path}: unknown kind of file; known are {', '.join(kinds)}, and .txt.gz, .tsv.gz"
        )
    return kinds[suffix]


class Npz:
    """numpy's own archive, compressed or not."""

    def read(self, path: Path, block_rows: int, string_keys: bool) -> Iterator[Block]:
        """As `Format`."""
        try:
            with zipfile.ZipFile(path) as archive:
                arrays = {}
                for entry in archive.namelist():
                    arrays[entry.removesuffix(".npy")] = self._stored(path, archive.open(entry))
                yield from blocks_of(path, arrays, block_rows)
        except (OSError, EOFError, zipfile.BadZipFile) as error:
            raise RowFileError(f"{path}: cannot be read: {error}") from error

    def _stored(self, path: Path, file: IO[bytes]) -> Stored:
        version = np.lib.format.read_magic(file)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, fortran, dtype = read_header(file)
        if dtype.hasobject or (fortran and len(shape) > 1):
            raise RowFileError(f"{path}: arrays must be plain and row by row, not {dtype}")
        return Stored(shape, rows_reader(path, file, dtype, shape[1:]))

    def write(
        self, path: Path, keys: Arrays, vectors: Arrays, shape: tuple[int, int], are_rows: bool
    ) -> None:
        """As `Format`."""
        kinds = (("rows" if are_rows else "keys", "<i8", shape[:1], keys),)
        with zipfile.ZipFile(path, "w") as archive:
            for name, dtype, array_shape, blocks in (*kinds, ("vectors", "<f4", shape, vectors)):
                header = {"descr": dtype, "fortran_order": False, "shape": array_shape}
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array_header_2_0(file, header)
                    for block in blocks():
                        file.write(block.astype(dtype).tobytes())


class Safetensors:
    """The format of that name: a header of JSON, then the arrays' bytes."""

    DTYPES = (
        ("I64", "int64"),
        ("U64", "uint64"),
        ("I32", "int32"),
        ("U32", "uint32"),
        ("F64", "float64"),
        ("F32", "float32"),
        ("F16", "float16"),
    )

    def read(self, path: Path, block_rows: int, string_keys: bool) -> Iterator[Block]:
        """As `Format`."""
        dtypes = {name: np.dtype(dtype) for name, dtype in self.DTYPES}
        dtypes["BF16"] = np.dtype(ml_dtypes.bfloat16)
        try:
            with contextlib.ExitStack() as stack:
                header, start = self._header(path)
                arrays = {}
                for name, entry in header.items():
                    if entry["dtype"] not in dtypes:
                        continue
                    file = stack.enter_context(open(path, "rb"))
                    file.seek(start + entry["data_offsets"][0])
                    shape = tuple(entry["shape"])
                    read = rows_reader(path, file, dtypes[entry["dtype"]], shape[1:])
                    arrays[name] = Stored(shape, read)
                yield from blocks_of(path, arrays, block_rows)
        except (OSError, KeyError, UnicodeDecodeError, struct.error, json.JSONDecodeError) as error:
            raise RowFileError(f"{path}: cannot be read: {error}") from error

    def _header(self, path: Path) -> tuple[dict[str, Any], int]:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if 8 + length > size:
                raise RowFileError(f"{path}: ends too early; is it complete?")
            header = json.loads(file.read(length).decode())
        header.pop("__metadata__", None)
        return header, 8 + length

    def write(
        self, path: Path, keys: Arrays, vectors: Arrays, shape: tuple[int, int], are_rows: bool
    ) -> None:
        """As `Format`."""
        split = shape[0] * 8
        name = "rows" if are_rows else "keys"
        header = {
            name: {"dtype": "I64", "shape": shape[:1], "data_offsets": [0, split]},
            "vectors": {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": [split, split + shape[0] * shape[1] * 4],
            },
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for block in keys():
                file.write(block.astype("<i8").tobytes())
            for block in vectors():
                file.write(block.astype("<f4").tobytes())


class Parquet:
    """Columns ``key`` (or ``row``) and ``vector``, a list of floats."""

    def read(self, path: Path, block_rows: int, string_keys: bool) -> Iterator[Block]:
        """As `Format`."""
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(path) as file:
                names = file.schema_arrow.names
                name = next((n for n in ("key", "row") if n in names), None)
                if "vector" not in names:
                    raise RowFileError(f"{path}: no column 'vector'; it has {names}")
                columns = ["vector", *([name] if name else [])]
                for batch in file.iter_batches(block_rows, columns=columns):
                    keys = batch.column(name).to_numpy(zero_copy_only=False) if name else None
                    vectors = _matrix(path, batch.column("vector"))
                    yield Block(keys, vectors, name == "row")
        except OSError as error:
            raise RowFileError(f"{path}: cannot be read: {error}") from error

    def write(
        self, path: Path, keys: Arrays, vectors: Arrays, shape: tuple[int, int], are_rows: bool
    ) -> None:
        """As `Format`."""
        import pyarrow as pa
        from pyarrow import parquet

        kind = pa.list_(pa.float32(), shape[1])
        schema = pa.schema([("row" if are_rows else "key", pa.int64()), ("vector", kind)])
        with parquet.ParquetWriter(path, schema) as writer:
            for ids, values in zip(keys(), vectors(), strict=True):
                flat = pa.array(values.reshape(-1), pa.float32())
                lists = pa.FixedSizeListArray.from_arrays(flat, shape[1])
                writer.write_batch(pa.record_batch([pa.array(ids), lists], schema=schema))


def _matrix(path: Path, column: Any) -> Array:
    import pyarrow.compute as pc

    lengths = np.asarray(pc.list_value_length(column).fill_null(-1), np.int64)
    found = sorted(set(lengths.tolist()))
    if len(found) > 1 or -1 in found:
        raise RowFileError(f"{path}: vectors must all have one length, found {found}")
    flat = column.flatten()
    if flat.null_count:
        raise RowFileError(f"{path}: a vector holds a null")
    width = int(lengths[0]) if len(lengths) else 0
    values: Array = np.asarray(flat).astype(np.float32).reshape(len(lengths), width)
    return values


class Text:
    """A key, a tab and the vector's numbers with spaces between them, on every line."""

    def read(self, path: Path, block_rows: int, string_keys: bool) -> Iterator[Block]:
        """As `Format`."""
        keys: list[Any] = []
        vectors: list[Array] = []
        try:
            with _open_text(path, "rt") as file:
                for number, line in enumerate(file, 1):
                    key, vector = _parse_line(f"{path}, line {number}", line, string_keys)
                    if vectors and len(vector) != len(vectors[0]):
                        raise RowFileError(
                            f"{path}, line {number}: {len(vector)} numbers, the line before has "
                            f"{len(vectors[0])}"
                        )
                    keys.append(key)
                    vectors.append(vector)
                    if len(keys) == block_rows:
                        yield Block(_keys(keys, string_keys), np.stack(vectors))
                        keys, vectors = [], []
        except (OSError, EOFError, UnicodeDecodeError, OverflowError) as error:
            raise RowFileError(f"{path}: cannot be read: {error}") from error
        if keys:
            yield Block(_keys(keys, string_keys), np.stack(vectors))

    def write(
        self, path: Path, keys: Arrays, vectors: Arrays, shape: tuple[int, int], are_rows: bool
    ) -> None:
        """As `Format`."""
        if are_rows:
            raise RowFileError(
                f"{path}: a hashed table does not know its keys, and text has no place for row "
                "numbers; write .npz, .safetensors or .parquet"
            )
        with _open_text(path, "wt") as file:
            for ids, values in zip(keys(), vectors(), strict=True):
                for key, vector in zip(ids.tolist(), values, strict=True):
                    # The shortest text that reads back as the same float32.
                    file.write(f"{key}\t{' '.join(map(str, vector))}\n")


def _keys(keys: list[Any], are_strings: bool) -> Array:
    if are_strings:
        return np.array(keys, object)
    # Not int64 for all: fingerprints go up to 2**64 - 1.
    return np.array(keys, np.uint64 if max(keys) >= 2**63 else np.int64)


def _parse_line(where: str, line: str, string_keys: bool) -> tuple[Any, Array]:
    key, tab, numbers = line.rstrip("\r\n").partition("\t")
    if not tab:
        raise RowFileError(f"{where}: expected key<TAB>numbers, got {key[:60]!r}")
    try:
        vector = np.array(numbers.split(), np.float32)
    except ValueError:
        raise RowFileError(f"{where}: not numbers: {numbers[:60]!r}") from None
    if string_keys:
        return key, vector
    try:
        return int(key), vector
    except ValueError:
        raise RowFileError(
            f"{where}: key {key!r} is no integer; if keys are strings say so (--string-keys)"
        ) from None


def _open_text(path: Path, mode: str) -> IO[Any]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    file: IO[Any] = opener(path, mode, encoding="utf-8")
    return file
