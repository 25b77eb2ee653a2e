# SPDX-License-Identifier: Apache-2.0
"""Where rows that cross the boundary lie in the blocks that cross it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.layout import SlabLayout
from jaxsparse.ops.packing.native import aligned_empty
from jaxsparse.store.swap import block_size, words_of

Int64s = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Block:
    """n rows of one slab, by device."""

    rows: npt.NDArray[np.int32]
    """``[N * K]`` local rows, padded with R."""
    places: Int64s
    """``[n]``: index in ``rows`` of each row, in the order of the codes it was made from."""
    tables: tuple[slice, ...]
    """By table of the slab: which of the n are its."""

    @property
    def is_empty(self) -> bool:
        """Whether there are no rows."""
        return self.places.size == 0


def codes_of(emb: EmbeddingCollection, table: str, rows: npt.NDArray[Any]) -> Int64s:
    """Codes ``[n]`` of rows of a table as the devices see it: shard * rows per shard + local row.

    Args:
        emb: the collection.
        table: its name.
        rows: ``[n]``, of a stored table places.
    """
    slab, number = emb.layout.find(table)
    shard, local_row = slab.tables[number].locate(rows, emb.num_shards)
    codes: Int64s = shard * slab.rows_per_shard + local_row
    return codes


def make_block(slab: SlabLayout, num_shards: int, codes: Sequence[Int64s]) -> Block:
    """Lays out rows for the devices that have them.

    Args:
        slab: of the rows.
        num_shards: devices of the mesh.
        codes: by table of the slab, ``[n]`` of its rows (`codes_of`).
    """
    ends = [0, *itertools.accumulate(part.size for part in codes)]
    tables = tuple(itertools.starmap(slice, itertools.pairwise(ends)))
    flat = np.concatenate(codes)
    num_blocks = 1 if slab.replicated else num_shards
    shard = flat // slab.rows_per_shard
    counts = np.bincount(shard, minlength=num_blocks)
    size = block_size(int(counts.max(initial=0)))
    order = np.argsort(shard, kind="stable")
    rank = np.empty(flat.size, np.int64)
    rank[order] = np.arange(flat.size) - np.repeat(np.cumsum(counts) - counts, counts)
    places = shard * size + rank
    rows = aligned_empty((num_blocks * size,), np.int32)
    rows[:] = slab.rows_per_shard
    rows[places] = flat - shard * slab.rows_per_shard
    return Block(rows, places, tables)


def spread(block: Block, values: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    """Values by table ``[n]`` in the block's order ``[N * K]``, 0 in its padding."""
    result = aligned_empty(block.rows.shape, dtype)
    result[:] = 0
    result[block.places] = np.concatenate(values)
    return result


def spread_numbers(block: Block, numbers: Sequence[npt.NDArray[np.uint64]]) -> tuple[Any, Any, Any]:
    """What rows are drawn from, as `make_rows` takes it: low and high words, index of the table."""
    words = [words_of(part) for part in numbers]
    tables = [np.full(part.size, index, np.int32) for index, part in enumerate(numbers)]
    return (
        spread(block, [low for low, _ in words], np.uint32),
        spread(block, [high for _, high in words], np.uint32),
        spread(block, tables, np.int32),
    )
