# SPDX-License-Identifier: Apache-2.0
"""The programs at the boundary of two passes: rows out, rows in, new rows made.

Each is one jit around one ``shard_map``, without a collective. Blocks have K places a device,
padded with row R, so few programs serve a run. Rows go out in a program of their own: beside the
donated scatter XLA would copy the slab.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import PartitionSpec

from jaxsparse.checks import STORED_KEYS
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.initial_rows import draw_rows, table_key
from jaxsparse.initializers import Initializer
from jaxsparse.layout import SlabLayout
from jaxsparse.ops.row_update import NATIVE_ROWS, XLA_ROWS, MovedRows, RowAccess
from jaxsparse.optimizers import Slots
from jaxsparse.store.row_format import from_words

MIN_BLOCK = 64
"""Fewest places of a block."""


def block_size(count: int) -> int:
    """Places for ``count`` rows: a power of two, so that few programs are compiled."""
    return max(MIN_BLOCK, 1 << (count - 1).bit_length()) if count else 0


def cut_of(emb: EmbeddingCollection, index: int) -> PartitionSpec:
    """How a slab, and blocks of its rows, lie on the mesh."""
    return PartitionSpec() if emb.layout.slabs[index].replicated else PartitionSpec(emb.axes)


def _on_mesh(emb: EmbeddingCollection, function: Any, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(
        function, mesh=emb.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


@partial(jax.jit, static_argnums=(0, 1))
def take_rows(
    emb: EmbeddingCollection, index: int, weights: jax.Array, slots: Slots, rows: jax.Array
) -> Any:
    """Weights (named "") and slots ``[N * K, ...]`` of local rows ``[N * K]``; 0 where there is
    none."""

    def local(weights: jax.Array, slots: Slots, rows: jax.Array) -> Slots:
        read = _access(emb).read
        return {"": read(weights, rows), **{name: read(slot, rows) for name, slot in slots.items()}}

    cut = cut_of(emb, index)
    return _on_mesh(emb, local, (cut, cut, cut), cut)(weights, slots, rows)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def put_rows(
    emb: EmbeddingCollection,
    index: int,
    weights: jax.Array,
    slots: Slots,
    rows: jax.Array,
    words: jax.Array,
) -> Any:
    """Slab and slots with rows overwritten, in place."""
    slab = emb.layout.slabs[index]

    def local(weights: jax.Array, slots: Slots, rows: jax.Array, words: jax.Array) -> Any:
        new_weights, new_slots = from_words(slab, words)
        return _write(emb, weights, slots, rows, new_weights, new_slots)

    cut = cut_of(emb, index)
    return _on_mesh(emb, local, (cut, cut, cut, cut), cut)(weights, slots, rows, words)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def make_rows(
    emb: EmbeddingCollection,
    index: int,
    weights: jax.Array,
    slots: Slots,
    init_words: jax.Array,
    rows: jax.Array,
    low: jax.Array,
    high: jax.Array,
    table: jax.Array,
) -> Any:
    """Slab and slots with rows as new, in place.

    Args:
        emb: the collection.
        index: of the slab.
        weights: the slab.
        slots: its slots.
        init_words: ``[2]`` uint32, those of `EmbeddingState`.
        rows: ``[N * K]`` int32 local rows.
        low: ``[N * K]`` uint32 low words of what each is drawn from.
        high: ``[N * K]`` uint32 high words.
        table: ``[N * K]`` int32 index in the slab of each row's table.
    """
    slab = emb.layout.slabs[index]

    def local(
        weights: jax.Array,
        slots: Slots,
        init_words: jax.Array,
        rows: jax.Array,
        low: jax.Array,
        high: jax.Array,
        table: jax.Array,
    ) -> Any:
        values = _draw(slab, init_words, low, high, table)
        new = slab.optimizer.init_slots(rows.size, slab.dim) if slab.trainable else {}
        return _write(emb, weights, slots, rows, values, new)

    cut, whole = cut_of(emb, index), PartitionSpec()
    specs = (cut, cut, whole, cut, cut, cut, cut)
    arrays = weights, slots, init_words, rows, low, high, table
    return _on_mesh(emb, local, specs, cut)(*arrays)


@partial(jax.jit, static_argnums=(0, 1))
def draw_initial(
    emb: EmbeddingCollection,
    index: int,
    init_words: jax.Array,
    low: jax.Array,
    high: jax.Array,
    table: jax.Array,
) -> Any:
    """Rows ``[K, D]`` as new, on every device; arguments as for `make_rows`."""
    slab, whole = emb.layout.slabs[index], PartitionSpec()
    specs = (whole, whole, whole, whole)
    return _on_mesh(emb, partial(_draw, slab), specs, whole)(init_words, low, high, table)


def _draw(
    slab: SlabLayout, init_words: jax.Array, low: jax.Array, high: jax.Array, table: jax.Array
) -> jax.Array:
    key = jax.random.wrap_key_data(init_words, impl=STORED_KEYS)
    keys = jnp.stack([table_key(key, block.spec.name) for block in slab.tables])[table]
    kinds: dict[Initializer, list[int]] = {}
    for number, block in enumerate(slab.tables):
        kinds.setdefault(block.spec.initializer, []).append(number)
    values = jnp.zeros((low.size, slab.dim), jnp.float32)
    for initializer, numbers in kinds.items():
        drawn = draw_rows(keys, low, high, initializer, slab.dim)
        mine = jnp.isin(table, jnp.asarray(np.array(numbers, np.int32)))
        values = drawn if len(kinds) == 1 else jnp.where(mine[:, None], drawn, values)
    return values


def _access(emb: EmbeddingCollection) -> RowAccess:
    return NATIVE_ROWS if emb.path == "native" else XLA_ROWS


def _write(
    emb: EmbeddingCollection,
    weights: jax.Array,
    slots: Slots,
    rows: jax.Array,
    new_weights: jax.Array,
    new_slots: Slots,
) -> tuple[jax.Array, Slots]:
    written = MovedRows(rows, new_weights, new_slots)
    return _access(emb).put(written, weights, slots, jnp.bool_(True))


def words_of(numbers: npt.NDArray[np.uint64]) -> tuple[Any, Any]:
    """Low and high words ``[n]`` uint32 of 64-bit numbers."""
    low = (numbers & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return low, (numbers >> np.uint64(32)).astype(np.uint32)
