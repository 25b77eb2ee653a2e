# SPDX-License-Identifier: Apache-2.0
"""Files that tests write: Criteo's format and Parquet, with rows that can be told apart."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxsparse.data import ColumnSchema
from jaxsparse.data.criteo import MISSING

IDS = ColumnSchema(features={"id": "id"})
"""Schema of `write_ids`."""


def criteo_cells(num_rows: int, seed: int = 0, first: int = 0) -> list[list[str]]:
    """Rows of 40 cells; the number of the row is in C1, one cell in ten is empty."""
    rng = np.random.default_rng([seed, first])
    rows = []
    for row in range(first, first + num_rows):
        integers = [str(value) for value in rng.integers(-3, 1000, 13)]
        keys = [f"{value:08x}" for value in rng.integers(0, 2**32, 26)]
        cells = [str(rng.integers(0, 2)), *integers, *keys]
        cells = [
            cell if at in (0, 14) or rng.random() > 0.1 else "" for at, cell in enumerate(cells)
        ]
        cells[14] = f"{row:08x}"
        rows.append(cells)
    return rows


def criteo_bytes(rows: Sequence[Sequence[str]], end: str = "\n") -> bytes:
    return "".join("\t".join(cells) + end for cells in rows).encode()


def write_bytes(path: Path, data: bytes, members: int = 1) -> Path:
    """Writes ``data``, as so many gzip members where the name says gzip."""
    if path.suffix == ".gz":
        size = -(-len(data) // members)
        data = b"".join(
            gzip.compress(data[at : at + size], mtime=0) for at in range(0, len(data), size or 1)
        )
    path.write_bytes(data)
    return path


def expected_criteo(cells: Sequence[str]) -> tuple[float, list[float], list[int]]:
    """Label, dense values and keys of a row, in plain Python."""
    dense = [np.log1p(max(int(cell), 0)) if cell else 0.0 for cell in cells[1:14]]
    keys = [int(cell, 16) if cell else MISSING for cell in cells[14:]]
    return float(cells[0]), dense, keys


def write_ids(path: Path, ids: Sequence[int], **options: Any) -> Path:
    """A Parquet or CSV file of a label and the column ``id``."""
    labels = [value % 2 for value in ids]
    if path.suffix == ".parquet":
        table = pa.table({"label": labels, "id": pa.array(ids, pa.int64())})
        pq.write_table(table, path, **options)
        return path
    lines = [f"{label},{value}\n" for label, value in zip(labels, ids, strict=True)]
    return write_bytes(path, ("label,id\n" + "".join(lines)).encode())


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def ids_of(batches: Any, name: str = "id") -> list[list[int]]:
    """Keys of the rows of every batch that are not padding."""
    return [
        batch.features[name].tolist()
        if batch.weights is None
        else batch.features[name][batch.weights > 0].tolist()
        for batch in batches
    ]
