# SPDX-License-Identifier: Apache-2.0
"""Initial rows of a slab, drawn where they lie, in one loop over chunks of all its tables."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxsparse.initializers import Initializer
from jaxsparse.layout import SlabLayout, TableBlock
from jaxsparse.resident import ResidentTable

MAX_CHUNK_ROWS = 1 << 15
"""Most rows drawn at a time: bounds temporaries (8 MiB a draw at D = 64)."""

DEFAULT_WORD = 0xDEFA
"""Third word that a stored table's default row is drawn from."""

MIN_CHUNK_ROWS = 1 << 8
"""Fewest: a loop turn costs as much as some hundred rows."""


def init_slab(key: jax.Array, slab: SlabLayout, device: jax.Array, num_devices: int) -> jax.Array:
    """This device's part ``[R, D]`` of a slab.

    A row is drawn from ``fold_in(table key, position)``, 64 bits of position as two words, so its
    value depends on (key, table name, position) alone: not on the mesh, the placement or the
    tables beside it.
    """
    part = jnp.zeros((slab.rows_per_shard, slab.dim), slab.dtype)
    by_initializer: dict[Initializer, list[TableBlock]] = {}
    for block in slab.tables:
        if isinstance(block.spec, ResidentTable):
            part = _init_default(key, slab, block, device, num_devices, part)
        else:
            by_initializer.setdefault(block.spec.initializer, []).append(block)
    for initializer, blocks in by_initializer.items():
        part = _init_blocks(key, slab, initializer, blocks, device, num_devices, part)
    return part


def draw_rows(
    keys: jax.Array, low: jax.Array, high: jax.Array, initializer: Initializer, dim: int
) -> jax.Array:
    """Rows ``[n, dim]`` float32 by what they are drawn from, a 64-bit number each.

    Args:
        keys: ``[n]`` keys of the rows' tables (`table_key`).
        low: ``[n]`` uint32 low words: of a key of a Dynamic table, else of a row's position.
        high: ``[n]`` uint32 high words.
        initializer: the tables'.
        dim: width of a row.
    """

    def draw(key: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
        return initializer(_row_key(key, low, high), (dim,), jnp.float32)

    return jnp.asarray(jax.vmap(draw)(keys, low, high))


def table_key(key: jax.Array, table: str) -> jax.Array:
    """What a table's rows are drawn from."""
    return jax.random.fold_in(key, np.uint32(crc32(table.encode())))


def _row_key(of_table: jax.Array, low: Any, high: Any) -> jax.Array:
    """What one row is drawn from: the key of its table and the words of its number."""
    return jax.random.fold_in(jax.random.fold_in(of_table, high), low)


def _init_default(
    key: jax.Array,
    slab: SlabLayout,
    block: TableBlock,
    device: jax.Array,
    num_devices: int,
    part: jax.Array,
) -> jax.Array:
    """Draws the default row of a stored table, if it has one; its other places hold no rows."""
    spec = block.spec
    assert isinstance(spec, ResidentTable)
    if spec.default_row is None:
        return part
    owner, row = (int(at[0]) for at in block.locate([spec.default_row], num_devices))
    # One word more than any row's number: no key draws the same.
    row_key = jax.random.fold_in(_row_key(table_key(key, spec.name), 0, 0), DEFAULT_WORD)
    mine = jnp.bool_(True) if slab.replicated else device == owner
    target = jnp.where(mine, row, slab.rows_per_shard)
    values = spec.initializer(row_key, (slab.dim,), slab.dtype)
    return part.at[target].set(values, mode="drop")


def _init_blocks(
    key: jax.Array,
    slab: SlabLayout,
    initializer: Initializer,
    blocks: list[TableBlock],
    device: jax.Array,
    num_devices: int,
    part: jax.Array,
) -> jax.Array:
    """Draws tables of one initializer: one loop, so that compiling does not grow with tables."""
    rows = np.array([block.rows for block in blocks])
    chunk = int(np.clip(rows.mean(), MIN_CHUNK_ROWS, MAX_CHUNK_ROWS))
    chunks_of = -(-rows // chunk)
    table_of = jnp.asarray(np.repeat(np.arange(rows.size), chunks_of).astype(np.int32))
    first_of = np.concatenate([np.arange(n) * chunk for n in chunks_of]).astype(np.int32)
    first_of_chunk = jnp.asarray(first_of)
    names = jnp.asarray(np.array([crc32(b.spec.name.encode()) for b in blocks], np.uint32))
    offsets = jnp.asarray(np.array([block.offset for block in blocks], np.int32))
    num_rows = jnp.asarray(rows.astype(np.int32))
    low, high, present = (jnp.asarray(a)[device] for a in _positions(blocks, num_devices))

    def write(index: jax.Array, part: jax.Array) -> jax.Array:
        table = table_of[index]
        row = first_of_chunk[index] + jnp.arange(chunk, dtype=jnp.int32)
        row_low = low[table] + row.astype(jnp.uint32)
        row_high = high[table] + (row_low < low[table]).astype(jnp.uint32)
        of_table = jax.random.fold_in(key, names[table])

        def draw(low_word: jax.Array, high_word: jax.Array) -> jax.Array:
            return initializer(_row_key(of_table, low_word, high_word), (slab.dim,), slab.dtype)

        values = jax.vmap(draw)(row_low, row_high)
        here = (row < num_rows[table]) & present[table]
        target = jnp.where(here, offsets[table] + row, slab.rows_per_shard)
        return part.at[target].set(values, mode="drop")

    filled: jax.Array = lax.fori_loop(0, first_of.size, write, part)
    return filled


def _positions(
    blocks: list[TableBlock], num_devices: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
    """By device and table ``[N, T]``: position of the block's first row as low and high word, and
    whether the device holds the block."""
    device = np.arange(num_devices, dtype=np.uint64)[:, None]
    step = np.array([b.rows if b.placement == "sharded" else 0 for b in blocks], np.uint64)
    first = device * step
    shards = np.array([-1 if block.shard is None else block.shard for block in blocks])
    present = (shards < 0) | (shards == np.arange(num_devices)[:, None])
    low = (first & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return low, (first >> np.uint64(32)).astype(np.uint32), present
