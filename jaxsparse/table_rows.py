# SPDX-License-Identifier: Apache-2.0
"""Rows of a table that lies on the devices, by key: found, read and written from the host."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import numpy.typing as npt

from jaxsparse import checks, programs
from jaxsparse.dynamic import Dynamic
from jaxsparse.hashing import Identity
from jaxsparse.ladder import bucket
from jaxsparse.state import EmbeddingState

if TYPE_CHECKING:
    from jaxsparse.embedding import EmbeddingCollection

Array = npt.NDArray[Any]
Int32s = npt.NDArray[np.int32]

AT_ONCE = 1 << 16
"""Rows moved at a time."""


def read(emb: EmbeddingCollection, state: EmbeddingState, table: str, keys: npt.ArrayLike) -> Array:
    """See `EmbeddingCollection.read`."""
    slab_index = _slab_index(emb, table)
    checks.check_state(state, emb.layout_fingerprint)
    return _gather(emb, state.slabs[slab_index], table, keys)


def read_slots(
    emb: EmbeddingCollection, state: EmbeddingState, table: str, keys: npt.ArrayLike
) -> dict[str, Array]:
    """See `EmbeddingCollection.read_slots`."""
    slab_index = _slab_index(emb, table)
    checks.check_state(state, emb.layout_fingerprint)
    slots = state.slots[slab_index]
    return {name: _gather(emb, array, table, keys) for name, array in slots.items()}


def write(
    emb: EmbeddingCollection,
    state: EmbeddingState,
    table: str,
    keys: npt.ArrayLike,
    rows: npt.ArrayLike,
    as_rows: bool,
) -> EmbeddingState:
    """See `EmbeddingCollection.write`."""
    owner, row = _locate(emb, table, keys, as_rows)
    checks.check_state(state, emb.layout_fingerprint)
    values = checks.float32_rows(table, rows)
    expected = (row.size, emb.tables[table].embedding_dim)
    if values.shape != expected:
        raise ValueError(f"write {table!r}: rows must be {expected}, got {values.shape}")
    _check_distinct(table, keys, owner, row)
    index = _slab_index(emb, table)
    slab = state.slabs[index]
    for chunk in range(0, row.size, AT_ONCE):
        part = slice(chunk, chunk + AT_ONCE)
        padding = bucket(row[part].size) - row[part].size
        slab = programs.scatter_rows(
            emb,
            emb.layout.slabs[index].replicated,
            slab,
            np.pad(owner[part], (0, padding)),
            np.pad(row[part], (0, padding), constant_values=np.iinfo(np.int32).max),
            np.pad(values[part], ((0, padding), (0, 0))),
        )
    slabs = (*state.slabs[:index], slab, *state.slabs[index + 1 :])
    return dataclasses.replace(state, slabs=slabs)


def _check_distinct(table: str, keys: npt.ArrayLike, owner: Int32s, row: Int32s) -> None:
    _, first, counts = np.unique(
        np.stack([owner, row]), axis=1, return_index=True, return_counts=True
    )
    if counts.size and counts.max() > 1:
        where = int(first[int(counts.argmax())])
        raise ValueError(
            f"write {table!r}: {counts.max()} keys address one row, the first is "
            f"{np.asarray(keys)[where : where + 1].tolist()[0]!r}; write each row once"
        )


def _slab_index(emb: EmbeddingCollection, table: str) -> int:
    if table not in emb.tables:
        raise ValueError(f"no table {table!r}; tables: {list(emb.tables)}")
    if table in emb.stored_tables:
        raise ValueError(
            f"table {table!r} has Dynamic keys or tiers: where its rows lie only its "
            "js.RowStore knows; use the store's read, read_slots and write"
        )
    slab, _ = emb.layout.find(table)
    return emb.layout.slabs.index(slab)


def _locate(
    emb: EmbeddingCollection, table: str, keys: npt.ArrayLike, as_rows: bool = False
) -> tuple[Int32s, Int32s]:
    """Owner and local row ``[n]`` of each key."""
    _slab_index(emb, table)
    slab, index = emb.layout.find(table)
    spec = emb.tables[table]
    rule = Identity() if as_rows else spec.keys
    assert not isinstance(rule, Dynamic), "refused by _slab_index"
    try:
        ids = rule.rows(keys, spec.vocabulary_size)
    except (ValueError, TypeError) as error:
        raise type(error)(f"table {table!r}: {error}") from error
    if ids.ndim != 1 or (ids < 0).any():
        raise ValueError(
            f"table {table!r}: keys must be [n], each with a row, got shape {ids.shape} "
            f"and {int((ids < 0).sum())} keys without one"
        )
    owner, row = slab.tables[index].locate(ids, emb.num_shards)
    return owner.astype(np.int32), row.astype(np.int32)


def _gather(emb: EmbeddingCollection, array: jax.Array, table: str, keys: npt.ArrayLike) -> Array:
    owner, row = _locate(emb, table, keys)
    slab, _ = emb.layout.find(table)
    chunks = [np.empty((0, *array.shape[1:]), array.dtype)]
    for start in range(0, row.size, AT_ONCE):
        part = slice(start, start + AT_ONCE)
        padding = bucket(row[part].size) - row[part].size
        values = programs.gather_rows(
            emb,
            slab.replicated,
            array,
            np.pad(owner[part], (0, padding)),
            np.pad(row[part], (0, padding)),
        )
        chunks.append(np.asarray(values)[: row[part].size])
    return np.concatenate(chunks)
