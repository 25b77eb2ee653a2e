# SPDX-License-Identifier: Apache-2.0
"""Rows of a table from files and back: npz, safetensors, Parquet or text, streamed.

Arrays are called ``keys [n]`` and ``vectors [n, D]``, Parquet's columns ``key`` and ``vector``; a
line of text is ``key<TAB>1.5 -0.25 ...``. A hashed table knows its rows, not the keys that led to
them: its rows go out as ``rows`` (Parquet: ``row``) instead of ``keys`` and come back the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxsparse.addressing import Addressing
from jaxsparse.ckpt.arrays import open_array
from jaxsparse.ckpt.blocks import Array, finish_reads
from jaxsparse.ckpt.errors import CheckpointError
from jaxsparse.ckpt.manifest import Manifest, read_manifest, stored_facts
from jaxsparse.ckpt.row_files import RowFileError
from jaxsparse.ckpt.row_formats import open_format
from jaxsparse.dynamic import Dynamic
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.hashing import Hashed
from jaxsparse.state import EmbeddingState

BLOCK_ROWS = 1 << 16
"""Rows read or written at a time."""


def import_rows(
    emb: EmbeddingCollection,
    state: EmbeddingState,
    table: str,
    path: str | Path,
    *,
    string_keys: bool | None = None,
) -> tuple[EmbeddingState, int]:
    """Overwrites rows of a table with those of a file; others and all slots stay.

    Args:
        emb: the collection.
        state: its state, donated.
        table: name of the table.
        path: ``.npz .safetensors .parquet .txt .tsv``, the last two also with ``.gz``. A file
            without keys holds row i of the table at place i.
        string_keys: of text: whether keys are strings; default what the table's exact keys are,
            else integers.

    Returns:
        The state, and how many rows were written.

    Raises:
        RowFileError: the file is broken, a key is invalid or comes twice, a vector is not finite
            or of another width; the text says where. The state is lost then.
    """
    if table not in emb.tables:
        raise RowFileError(f"no table {table!r}; tables: {list(emb.tables)}")
    spec = emb.tables[table]
    if isinstance(spec.keys, Dynamic) or spec.tiers is not None:
        raise RowFileError(
            f"table {table!r} has Dynamic keys or tiers; write its rows by js.RowStore.write"
        )
    strings = _has_string_keys(spec.keys) if string_keys is None else string_keys
    seen = np.zeros(spec.vocabulary_size, bool)
    count = 0
    for block in open_format(Path(path)).read(Path(path), BLOCK_ROWS, strings):
        where = f"{path}, row {count}"
        _check_vectors(where, block.vectors, spec.embedding_dim)
        try:
            keys, as_rows = block.keys, block.are_rows
            if keys is None:
                keys, as_rows = np.arange(count, count + len(block.vectors)), True
            rows = keys if as_rows else spec.keys.rows(keys, spec.vocabulary_size)
            _check_rows(where, keys, rows, seen)
            state = emb.write(state, table, rows, block.vectors, as_rows=True)
        except RowFileError:
            raise
        except (ValueError, TypeError) as error:
            raise RowFileError(f"{where} and after: {error}") from error
        count += len(block.vectors)
    return state, count


def export_rows(checkpoint: str | Path, table: str, path: str | Path) -> int:
    """Writes all rows of a saved table to a file, in float32; needs no mesh.

    The order is that of the save, not of the keys: rows are streamed. Of a table with Dynamic keys
    or tiers those rows that have keys; Dynamic keys are written as the int64 of the same 64 bits.

    Args:
        checkpoint: folder of a save.
        table: name of the table.
        path: as in `import_rows`.

    Returns:
        How many rows were written.

    Raises:
        CheckpointError: the checkpoint is damaged or has no such table.
        RowFileError: unknown kind of file, or text for a hashed table.
    """
    folder, path = Path(checkpoint).absolute(), Path(path)
    manifest = read_manifest(folder)
    tables = manifest["tables"]
    if table not in tables:
        raise CheckpointError(f"{folder}: no table {table!r}; tables: {list(tables)}")
    shape, dtype = manifest["leaves"][f"tables/{table}/rows"]
    if table in stored_facts(manifest):
        windows = partial(_stored_keys, folder, manifest, table, shape[0])
        num_rows = int(shape[0])
    else:
        order = Addressing(tables[table]["vocabulary_size"])
        windows = partial(_plain_keys, order, shape[0])
        num_rows = order.vocabulary_size
    reader = open_array(folder, manifest, table, "rows")

    def keys() -> Iterator[Array]:
        for found, there, _ in windows():
            yield found[there]

    def vectors() -> Iterator[Array]:
        for _, there, start in windows():
            values = np.empty((len(there), shape[1]), np.dtype(dtype))
            finish_reads(reader.read_into(values, start))
            yield values[there].astype(np.float32)

    are_rows = tables[table]["keys"].startswith("hashed")
    open_format(path).write(path, keys, vectors, (num_rows, shape[1]), are_rows)
    return num_rows


def _plain_keys(order: Addressing, num_positions: int) -> Iterator[tuple[Array, Array, int]]:
    """Ids, which of them there are, and the first position, window by window."""
    for start in range(0, num_positions, BLOCK_ROWS):
        ids = order.id_at(np.arange(start, min(start + BLOCK_ROWS, num_positions)))
        yield ids, ids >= 0, start


def _stored_keys(
    folder: Path, manifest: Manifest, table: str, num_rows: int
) -> Iterator[tuple[Array, Array, int]]:
    """As `_plain_keys`, of a table of a row store: keys as they were saved."""
    reader = open_array(folder, manifest, table, "keys")
    for start in range(0, num_rows, BLOCK_ROWS):
        keys = np.empty(min(BLOCK_ROWS, num_rows - start), np.uint64)
        finish_reads(reader.read_into(keys, start))
        yield keys.view(np.int64), np.ones(keys.size, bool), start


def _has_string_keys(keys: Any) -> bool:
    exact = keys.exact_keys if isinstance(keys, Hashed) else None
    return exact is not None and exact.dtype == object


def _check_vectors(where: str, vectors: Array, dim: int) -> None:
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise RowFileError(f"{where}: vectors must be [n, {dim}], got {list(vectors.shape)}")
    bad = ~np.isfinite(vectors).all(axis=1)
    if bad.any():
        raise RowFileError(f"{where} + {int(bad.argmax())}: the vector is not finite")


def _check_rows(where: str, keys: Array, rows: Array, seen: Array) -> None:
    outside = (rows < 0) | (rows >= len(seen))
    if outside.any():
        at = int(outside.argmax())
        raise RowFileError(
            f"{where} + {at}: {keys[at : at + 1].tolist()[0]!r} has no row in 0..{len(seen) - 1}"
        )
    first = np.zeros(len(rows), bool)
    first[np.unique(rows, return_index=True)[1]] = True
    twice = seen[rows] | ~first
    if twice.any():
        at = int(twice.argmax())
        raise RowFileError(
            f"{where} + {at}: key {keys[at : at + 1].tolist()[0]!r} leads to row {rows[at]}, which "
            "was given before; give each row once"
        )
    seen[rows] = True


__all__ = ["RowFileError", "export_rows", "import_rows"]
