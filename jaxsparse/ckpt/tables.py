# SPDX-License-Identifier: Apache-2.0
"""Tables from the slabs to disk and back, block by block, in position order.

The order of a table's rows does not depend on the mesh (docs/design.md, "Where a row lies"): what
8 devices saved 3 devices read by slicing. No array of a table's size is made on the way.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxsparse.ckpt.blocks import Array, ArrayReader, block_rows, finish_reads
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.layout import SlabLayout, TableBlock
from jaxsparse.state import EmbeddingState

Shards = dict[int, Any]
"""This process's parts of a slab's array by shard, on their devices or copied to the host."""


def slab_arrays(state: EmbeddingState, index: int) -> dict[str, Any]:
    """Arrays of a slab: ``rows``, and the slot variables as ``slot.<name>``."""
    slots = {f"slot.{name}": array for name, array in state.slots[index].items()}
    return {"rows": state.slabs[index], **slots}


@dataclasses.dataclass(frozen=True)
class TableArray:
    """One array of a table, such as its rows or a slot variable, as a state holds it."""

    emb: EmbeddingCollection
    slab: SlabLayout
    block: TableBlock
    name: str
    """``rows`` or ``slot.<name>``."""
    shards: Shards
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """``[P, ...]``: all places of the table, those without a row included."""
        return self.block.addressing.num_positions, *self.row_shape

    def parts(self) -> list[tuple[int, int]]:
        """``(first row, process)`` of each part: what one process writes as one array."""
        processes = [device.process_index for device in self.emb.mesh.devices.flat]
        if self.block.placement == "replicated":
            return [(0, processes[0])]
        if self.block.placement == "single":
            return [(0, processes[self.block.shard or 0])]
        starts = range(0, self.shape[0], self.block.rows)
        owners = zip(starts, processes, strict=False)
        runs = itertools.groupby(owners, key=lambda pair: pair[1])
        return [(next(run)[0], process) for process, run in runs]

    def blocks(self, start: int, stop: int) -> Iterator[Array]:
        """Rows ``start .. stop`` in order, a block at a time."""
        size = block_rows(self.row_shape, self.dtype, stop - start)
        for first in range(start, stop, size):
            yield self.read(first, min(first + size, stop))

    def read(self, start: int, stop: int) -> Array:
        """Rows at positions ``start .. stop``; a view where they lie together in host memory."""
        pieces = []
        while start < stop:
            shard, row = self._locate(start)
            count = stop - start
            if self.block.placement == "sharded":
                count = min(count, self.block.rows - (row - self.block.offset))
            pieces.append(_read_shard(self.shards[shard], row, count))
            start += count
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _locate(self, position: int) -> tuple[int, int]:
        if self.block.placement == "sharded":
            shard, row = divmod(position, self.block.rows)
            return shard, row + self.block.offset
        return self.block.shard or 0, position + self.block.offset


Copies = dict[tuple[int, str, int], Array]
"""Parts of a state on the host, by slab, array and shard."""


def table_arrays(
    emb: EmbeddingCollection, state: EmbeddingState, copies: Copies | None = None
) -> list[TableArray]:
    """All arrays of all tables but those of a row store.

    Args:
        emb: the collection.
        state: its state.
        copies: copy everything into these now, so that the state may be donated; what is missing
            or of another shape is added. None reads the state when it is asked for.
    """
    arrays = []
    for index, slab in enumerate(emb.layout.slabs):
        if slab.is_stored:
            continue
        for name, array in slab_arrays(state, index).items():
            shards = _shards(emb, slab, array)
            if copies is not None:
                shards = {
                    shard: _copied(copies, (index, name, shard), part)
                    for shard, part in shards.items()
                }
            for block in slab.tables:
                dtype = np.dtype(array.dtype)
                arrays.append(TableArray(emb, slab, block, name, shards, array.shape[1:], dtype))
    return arrays


def _copied(copies: Copies, key: tuple[int, str, int], part: Any) -> Array:
    """A part in the memory of its last copy: pages that are new cost ten times the copying."""
    held = copies.get(key)
    if held is None or (held.shape, held.dtype) != (part.shape, part.dtype):
        held = copies[key] = np.empty(part.shape, part.dtype)
    np.copyto(held, np.asarray(part))
    return held


def _shards(emb: EmbeddingCollection, slab: SlabLayout, array: jax.Array) -> Shards:
    parts = {part.device: part.data for part in array.addressable_shards}
    if slab.replicated:
        return {0: next(iter(parts.values()))}
    devices = enumerate(emb.mesh.devices.flat)
    return {shard: parts[device] for shard, device in devices if device in parts}


def _read_shard(part: Any, row: int, count: int) -> Array:
    if isinstance(part, np.ndarray):
        return part[row : row + count]
    if next(iter(part.devices())).platform == "cpu":
        # No copy: the view must be gone before the array is donated, or donating copies it.
        return np.asarray(part)[row : row + count]
    return np.asarray(lax.dynamic_slice_in_dim(part, row, count))


Readers = Mapping[tuple[str, str], ArrayReader]
"""By table and array; what is not there keeps its values."""


def fill_tables(
    emb: EmbeddingCollection, state: EmbeddingState, readers: Readers
) -> EmbeddingState:
    """Overwrites tables with what was saved, in place, a window of every device at a time.

    Args:
        emb: of the mesh the state lives on.
        state: donated; tables that have no reader keep their values.
        readers: of arrays ``[P, ...]`` in position order.

    Raises:
        CheckpointError: an array cannot be read; the state is lost then.
    """
    slabs, slots = [], []
    for index, slab in enumerate(emb.layout.slabs):
        if slab.is_stored:
            slabs.append(state.slabs[index])
            slots.append(state.slots[index])
            continue
        filled = {
            name: _fill(emb, slab, name, array, readers)
            for name, array in slab_arrays(state, index).items()
        }
        slabs.append(filled.pop("rows"))
        slots.append({name.removeprefix("slot."): array for name, array in filled.items()})
    return dataclasses.replace(state, slabs=tuple(slabs), slots=tuple(slots))


def _fill(
    emb: EmbeddingCollection, slab: SlabLayout, name: str, array: jax.Array, readers: Readers
) -> jax.Array:
    size = block_rows(array.shape[1:], array.dtype, slab.rows_per_shard)
    shards = [0] if slab.replicated else list(range(emb.num_shards))
    spec = PartitionSpec() if slab.replicated else PartitionSpec(emb.axes)
    sharding = NamedSharding(emb.mesh, spec)
    process = jax.process_index()
    if not slab.replicated:
        devices = list(emb.mesh.devices.flat)
        shards = [s for s in shards if devices[s].process_index == process]
    for start in range(0, slab.rows_per_shard, size):
        # The last window ends with the slab: one program serves all of them.
        first = min(start, slab.rows_per_shard - size)
        windows, masks = _read_windows(emb, slab, name, array, readers, shards, first, size)
        window, mask = (_global(parts, sharding, slab, emb) for parts in (windows, masks))
        array = _put_window(emb, slab.replicated, array, window, mask, np.int32(first))
    return array


def _global(
    parts: dict[int, Array], sharding: NamedSharding, slab: SlabLayout, emb: EmbeddingCollection
) -> jax.Array:
    """The global array of every shard's part."""
    size, *row_shape = next(iter(parts.values())).shape
    count = size * (1 if slab.replicated else emb.num_shards)

    def part(index: Any) -> Array:
        return parts[(index[0].start or 0) // size]

    return jax.make_array_from_callback((count, *row_shape), sharding, part)


def _read_windows(
    emb: EmbeddingCollection,
    slab: SlabLayout,
    name: str,
    array: Any,
    readers: Readers,
    shards: list[int],
    first: int,
    size: int,
) -> tuple[dict[int, Array], dict[int, Array]]:
    """Rows ``first .. first + size`` of shards, and which of them were saved."""
    windows = {s: np.zeros((size, *array.shape[1:]), array.dtype) for s in shards}
    masks = {s: np.zeros(size, bool) for s in shards}
    reads = []
    for shard, block in itertools.product(shards, slab.tables):
        reader = readers.get((block.spec.name, name))
        if reader is None or block.shard not in (None, shard):
            continue
        begin = shard * block.rows if block.placement == "sharded" else 0
        rows = min(block.rows, block.addressing.num_positions - begin)
        low = max(first, block.offset)
        high = min(first + size, block.offset + rows)
        if low < high:
            out = windows[shard][low - first : high - first]
            reads += reader.read_into(out, begin + low - block.offset)
            masks[shard][low - first : high - first] = True
    finish_reads(reads)
    return windows, masks


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _put_window(
    emb: EmbeddingCollection, replicated: bool, array: Any, window: Any, mask: Any, first: Any
) -> Any:
    spec = PartitionSpec() if replicated else PartitionSpec(emb.axes)

    def put(array: jax.Array, window: jax.Array, mask: jax.Array, first: jax.Array) -> jax.Array:
        old = lax.dynamic_slice_in_dim(array, first, window.shape[0])
        saved = mask.reshape(-1, *[1] * (window.ndim - 1))
        new = jnp.where(saved, window, old)
        return lax.dynamic_update_slice_in_dim(array, new, first, 0)

    specs = (spec, spec, spec, PartitionSpec())
    return jax.shard_map(put, mesh=emb.mesh, in_specs=specs, out_specs=spec, check_vma=False)(
        array, window, mask, first
    )
