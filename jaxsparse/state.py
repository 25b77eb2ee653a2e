# SPDX-License-Identifier: Apache-2.0
"""`EmbeddingState`, and how its rows are made, found, read and written on the mesh."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxsparse.layout import Layout, SlabLayout, TableBlock
from jaxsparse.optimizers import Slots

if TYPE_CHECKING:
    from jaxsparse.embedding import EmbeddingCollection

INIT_ROWS = 1 << 15
"""Rows drawn at a time by `init`: bounds its temporaries (8 MiB a draw at D = 64)."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("slabs", "slots", "learning_rates"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class EmbeddingState:
    """Everything an `EmbeddingCollection` trains; a pytree, donated by eager updates."""

    slabs: tuple[jax.Array, ...]
    """By slab of the layout: ``[N * R, D]`` cut over the mesh, ``[R, D]`` when replicated."""

    slots: tuple[Slots, ...]
    """By slab: slot variables with the slab's rows; empty for a frozen slab."""

    learning_rates: dict[str, jax.Array]
    """By trainable table, float32 scalar: the rate, or what the table's schedule is multiplied
    with (1.0 at first). Replacing one compiles nothing."""

    def with_learning_rate(self, table: str, rate: float) -> EmbeddingState:
        """The same state with another rate for one table (a factor where it has a schedule).

        Raises:
            ValueError: no such trainable table.
        """
        if table not in self.learning_rates:
            raise ValueError(
                f"no trainable table {table!r}; trainable: {sorted(self.learning_rates)}"
            )
        old = self.learning_rates[table]
        new = jax.device_put(jnp.float32(rate), old.sharding)
        return dataclasses.replace(self, learning_rates={**self.learning_rates, table: new})


def state_spec(
    layout: Layout, axes: tuple[str, ...], slots: tuple[tuple[str, ...], ...]
) -> EmbeddingState:
    """PartitionSpec of every leaf, given the slot names of each slab."""
    whole: Any = PartitionSpec()
    cuts: list[Any] = [whole if slab.replicated else PartitionSpec(axes) for slab in layout.slabs]
    rates = {b.spec.name: whole for s in layout.slabs if s.trainable for b in s.tables}
    return EmbeddingState(
        slabs=tuple(cuts),
        slots=tuple({name: cut for name in names} for cut, names in zip(cuts, slots, strict=True)),
        learning_rates=rates,
    )


def init_slab(key: jax.Array, slab: SlabLayout, device: jax.Array) -> jax.Array:
    """This device's part ``[R, D]`` of a slab.

    A row is drawn from ``fold_in(table key, position)``, 64 bits of position as two words, so its
    value depends on (key, table name, position) alone: not on the mesh, the placement or the
    tables beside it. Rows that belong to no id stay 0.
    """
    part = jnp.zeros((slab.rows_per_shard, slab.dim), slab.dtype)
    for block in slab.tables:
        part = _init_block(key, slab, block, device, part)
    return part


def _init_block(
    key: jax.Array, slab: SlabLayout, block: TableBlock, device: jax.Array, part: jax.Array
) -> jax.Array:
    table_key = jax.random.fold_in(key, crc32(block.spec.name.encode()))
    chunk = min(INIT_ROWS, block.rows)
    present = jnp.bool_(True) if block.shard is None else device == block.shard
    low, high = _first_position(block, device)

    def draw(low_word: jax.Array, high_word: jax.Array) -> jax.Array:
        row_key = jax.random.fold_in(jax.random.fold_in(table_key, high_word), low_word)
        return block.spec.initializer(row_key, (slab.dim,), slab.dtype)

    def write(index: jax.Array, part: jax.Array) -> jax.Array:
        row = index * chunk + jnp.arange(chunk, dtype=jnp.int32)
        row_low = low + row.astype(jnp.uint32)
        row_high = high + (row_low < low).astype(jnp.uint32)
        values = jax.vmap(draw)(row_low, row_high)
        target = jnp.where((row < block.rows) & present, block.offset + row, slab.rows_per_shard)
        return part.at[target].set(values, mode="drop")

    filled: jax.Array = lax.fori_loop(0, -(-block.rows // chunk), write, part)
    return filled


def _first_position(block: TableBlock, device: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Low and high word of the position of the block's first row on this device."""
    if block.placement != "sharded":
        return jnp.uint32(0), jnp.uint32(0)
    num_devices = -(-block.addressing.num_positions // block.rows)
    first = np.arange(max(num_devices, 1), dtype=np.uint64) * np.uint64(block.rows)
    at = jnp.minimum(device, first.size - 1)
    low = jnp.asarray((first & np.uint64(0xFFFFFFFF)).astype(np.uint32))[at]
    high = jnp.asarray((first >> np.uint64(32)).astype(np.uint32))[at]
    # Devices behind the last one with rows hold padding only: any position serves there.
    return low, high


def row_rates(
    emb: EmbeddingCollection,
    slab: SlabLayout,
    rates: dict[str, jax.Array],
    rows: jax.Array,
    device: jax.Array,
) -> jax.Array:
    """Learning rate ``[K, 1]`` of each local row's table."""
    if len(slab.tables) == 1:
        return jnp.full((rows.shape[0], 1), rates[slab.tables[0].spec.name])
    starts = slab.table_starts(emb.num_shards)
    order = np.argsort(starts, axis=1, kind="stable")
    at = 0 if slab.replicated else device
    ordered = jnp.asarray(np.take_along_axis(starts, order, axis=1).astype(np.int32))[at]
    table = jnp.asarray(order.astype(np.int32))[at]
    place = jnp.searchsorted(ordered, rows, side="right", method="scan_unrolled") - 1
    by_table = jnp.stack([rates[block.spec.name] for block in slab.tables])
    return by_table[table[place]][:, None]


def read_rows(
    array: jax.Array, owner: jax.Array, row: jax.Array, emb: EmbeddingCollection, replicated: bool
) -> jax.Array:
    """Rows of a slab or slot, on every device; per-device blocks.

    Args:
        array: this device's part ``[R, ...]``.
        owner: ``[n]`` int32 shard of each row.
        row: ``[n]`` int32 local row.
        emb: the collection.
        replicated: every device has all rows.

    Returns:
        ``[n, ...]``, bitwise as stored: the sum over devices is taken on the bits, since adding
        float zeros would turn -0.0 into 0.0.
    """
    mine = jnp.bool_(True) if replicated else owner == lax.axis_index(emb.axes)
    values = array.at[jnp.where(mine, row, array.shape[0])].get(mode="fill", fill_value=0)
    if replicated or emb.num_shards == 1:
        return values
    bits = jnp.uint16 if array.dtype.itemsize == 2 else jnp.uint32
    summed = lax.psum(lax.bitcast_convert_type(values, bits), emb.axes)
    return lax.bitcast_convert_type(summed, array.dtype)


def write_rows(
    array: jax.Array,
    owner: jax.Array,
    row: jax.Array,
    values: jax.Array,
    emb: EmbeddingCollection,
    replicated: bool,
) -> jax.Array:
    """Writes rows ``[n, ...]`` where this device owns them; ``row`` past the end writes nowhere."""
    mine = jnp.bool_(True) if replicated else owner == lax.axis_index(emb.axes)
    target = jnp.where(mine, row, array.shape[0])
    return array.at[target].set(values.astype(array.dtype), mode="drop")
