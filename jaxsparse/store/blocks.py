# SPDX-License-Identifier: Apache-2.0
"""Where rows that cross the boundary lie in the blocks that cross it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.ops.packing.native import aligned_empty
from jaxsparse.processes import is_shared, local_devices
from jaxsparse.store.swap import block_size, words_of

Int64s = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows of one slab, by device; of the devices of other processes only how much room they take.

    N are the devices of this process, n the rows that these have.
    """

    rows: npt.NDArray[np.int32]
    """``[N * K]`` local rows, padded with R."""
    places: tuple[Int64s, ...]
    """By table of the slab, index in ``rows`` of each row, in the order of its codes."""
    masks: tuple[npt.NDArray[np.bool_], ...] | None
    """By table, which of the codes are of this process's devices; None for all."""

    @property
    def is_empty(self) -> bool:
        """Whether there are no rows, of any process."""
        return self.rows.size == 0

    def own(self, table: int, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Of values by code of a table, those of this process's devices."""
        return values if self.masks is None else values[self.masks[table]]


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


def make_block(emb: EmbeddingCollection, index: int, codes: Sequence[Int64s]) -> Block:
    """Lays out rows for the devices that have them.

    Args:
        emb: the collection.
        index: of the slab.
        codes: by table of the slab, those of its rows (`codes_of`), on the devices of all
            processes.
    """
    slab = emb.layout.slabs[index]
    devices = slice(0, 1 if slab.replicated else emb.num_shards)
    shards = [part // slab.rows_per_shard for part in codes]
    counts = np.bincount(np.concatenate(shards), minlength=devices.stop)
    size = block_size(int(counts.max(initial=0)))
    masks = None
    if not slab.replicated and is_shared(emb.mesh):
        devices = local_devices(emb.mesh)
        masks = tuple((part >= devices.start) & (part < devices.stop) for part in shards)
        codes = [part[mask] for part, mask in zip(codes, masks, strict=True)]
        counts = counts[devices]
    flat = np.concatenate(codes)
    shard = flat // slab.rows_per_shard
    order = np.argsort(shard, kind="stable")
    rank = np.empty(flat.size, np.int64)
    rank[order] = np.arange(flat.size) - np.repeat(np.cumsum(counts) - counts, counts)
    places = (shard - devices.start) * size + rank
    rows = aligned_empty(((devices.stop - devices.start) * size,), np.int32)
    rows[:] = slab.rows_per_shard
    rows[places] = flat - shard * slab.rows_per_shard
    ends = np.cumsum([part.size for part in codes])[:-1]
    return Block(rows, tuple(np.split(places, ends)), masks)


def spread(block: Block, values: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    """Values by table and code in the block's order ``[N * K]``, 0 in its padding."""
    result = aligned_empty(block.rows.shape, dtype)
    result[:] = 0
    for number, part in enumerate(values):
        result[block.places[number]] = block.own(number, part)
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
