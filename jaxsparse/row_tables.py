# SPDX-License-Identifier: Apache-2.0
"""Which table each row of a slab is of, as the update of rows needs it."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.layout import SlabLayout
from jaxsparse.ops.row_update import RowTables

if TYPE_CHECKING:
    from jaxsparse.embedding import EmbeddingCollection


def row_tables(
    emb: EmbeddingCollection, slab: SlabLayout, rates: dict[str, jax.Array], device: jax.Array
) -> RowTables:
    """The tables of a slab on one device.

    What the rounding of a row depends on is its position in its table, which no mesh changes, and
    the table's name.

    Args:
        emb: the collection.
        slab: one of its slabs.
        rates: learning rate by table, float32 scalars.
        device: int32 index of the device in the mesh.
    """
    num_shards = 1 if slab.replicated else emb.num_shards
    starts = slab.table_starts(emb.num_shards)[:num_shards]
    noise = np.array([zlib.crc32(block.spec.name.encode()) for block in slab.tables], np.int64)
    shards = np.arange(num_shards)[:, None]
    # First row on a shard: position in the table, less its row in the slab.
    cut = np.array([block.placement == "sharded" for block in slab.tables])
    rows = np.array([block.rows for block in slab.tables], np.int64)
    offsets = np.array([block.offset for block in slab.tables], np.int64)
    noise = (noise + np.where(cut, shards * rows, 0) - offsets) % 2**32
    order = np.argsort(starts, axis=1, kind="stable")
    by_table = jnp.stack([rates[block.spec.name] for block in slab.tables])
    if num_shards == 1:
        at: jax.Array | int = 0
    else:
        at = device
    starts = np.take_along_axis(starts, order, axis=1).astype(np.int32)
    noise = np.take_along_axis(noise, order, axis=1).astype(np.uint32)
    table = jnp.asarray(order.astype(np.int32))[at]
    return RowTables(jnp.asarray(starts)[at], by_table[table], jnp.asarray(noise)[at])
