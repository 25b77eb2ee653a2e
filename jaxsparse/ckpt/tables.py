# SPDX-License-Identifier: Apache-2.0
"""Slabs to tables in position order and back.

The order of a table's rows does not depend on the mesh (DESIGN section 5), only the number of
rows behind the last one does: every array here is ``[N * ceil(P / N), ...]``, cut over the N
devices, whatever the table's placement. Cutting or padding it at the end fits it to another mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.layout import SlabLayout, TableBlock
from jaxsparse.state import EmbeddingState

TableArrays = dict[str, dict[str, Any]]
"""By table: ``rows`` and the slot variables, each under its name as ``slot.<name>``."""


def num_saved_rows(block: TableBlock, num_shards: int) -> int:
    """``N * ceil(P / N)``."""
    return num_shards * block.addressing.rows_per_shard(num_shards)


def split_tables(emb: EmbeddingCollection, state: EmbeddingState) -> TableArrays:
    """Arrays of every table, cut over the mesh; a copy of the tables, in device memory."""
    tables: TableArrays = {}
    for index, slab in enumerate(emb.layout.slabs):
        for position, block in enumerate(slab.tables):
            tables[block.spec.name] = {
                name: _take_table(emb, slab, position, array)
                for name, array in _slab_arrays(state, index).items()
            }
    return tables


def abstract_tables(emb: EmbeddingCollection, state: EmbeddingState) -> TableArrays:
    """Shapes, dtypes and shardings of what `split_tables` returns."""
    sharding = NamedSharding(emb.mesh, PartitionSpec(emb.axes))
    return {
        block.spec.name: {
            name: jax.ShapeDtypeStruct(
                (num_saved_rows(block, emb.num_shards), *array.shape[1:]),
                array.dtype,
                sharding=sharding,
            )
            for name, array in _slab_arrays(state, index).items()
        }
        for index, slab in enumerate(emb.layout.slabs)
        for block in slab.tables
    }


def join_tables(
    emb: EmbeddingCollection,
    template: EmbeddingState,
    tables: Mapping[str, Mapping[str, Any]],
    learning_rates: dict[str, jax.Array],
) -> EmbeddingState:
    """The inverse of `split_tables`.

    Args:
        emb: of the mesh the state will live on.
        template: shapes of its state; values are not read.
        tables: as `split_tables` of any mesh, fitted to this one's number of rows.
        learning_rates: the state's.
    """
    slabs, slots = [], []
    for index, slab in enumerate(emb.layout.slabs):
        joined = {
            name: _put_tables(emb, slab, array, [tables[b.spec.name][name] for b in slab.tables])
            for name, array in _slab_arrays(template, index).items()
        }
        slabs.append(joined.pop("rows"))
        slots.append({name.removeprefix("slot."): array for name, array in joined.items()})
    return EmbeddingState(tuple(slabs), tuple(slots), learning_rates, template.layout)


def _slab_arrays(state: EmbeddingState, index: int) -> dict[str, Any]:
    slots = {f"slot.{name}": array for name, array in state.slots[index].items()}
    return {"rows": state.slabs[index], **slots}


def _take_table(
    emb: EmbeddingCollection, slab: SlabLayout, position: int, array: jax.Array
) -> jax.Array:
    block = slab.tables[position]

    def take(array: jax.Array) -> jax.Array:
        part = slice(block.offset, block.offset + block.rows)
        if block.placement == "sharded":
            by_shard = array.reshape(emb.num_shards, slab.rows_per_shard, *array.shape[1:])
            return by_shard[:, part].reshape(-1, *array.shape[1:])
        start = (block.shard or 0) * slab.rows_per_shard
        rows = array[start + part.start : start + part.stop]
        missing = num_saved_rows(block, emb.num_shards) - block.rows
        return jnp.pad(rows, [(0, missing)] + [(0, 0)] * (array.ndim - 1))

    sharding = NamedSharding(emb.mesh, PartitionSpec(emb.axes))
    taken: jax.Array = jax.jit(take, out_shardings=sharding)(array)
    return taken


def _put_tables(
    emb: EmbeddingCollection, slab: SlabLayout, like: Any, arrays: list[jax.Array]
) -> jax.Array:
    shards = 1 if slab.replicated else emb.num_shards
    spec = PartitionSpec() if slab.replicated else PartitionSpec(emb.axes)

    def put(arrays: list[jax.Array]) -> jax.Array:
        by_shard = jnp.zeros((shards, slab.rows_per_shard, *like.shape[1:]), like.dtype)
        for block, array in zip(slab.tables, arrays, strict=True):
            part = slice(block.offset, block.offset + block.rows)
            if block.placement == "sharded":
                rows = array.reshape(emb.num_shards, block.rows, *like.shape[1:])
                by_shard = by_shard.at[:, part].set(rows)
            else:
                by_shard = by_shard.at[block.shard or 0, part].set(array[: block.rows])
        return by_shard.reshape(like.shape)

    joined: jax.Array = jax.jit(put, out_shardings=NamedSharding(emb.mesh, spec))(arrays)
    return joined
