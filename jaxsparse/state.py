# SPDX-License-Identifier: Apache-2.0
"""`EmbeddingState`, and how its rows are found, read and written on the mesh."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxsparse.layout import Layout
from jaxsparse.optimizers import Slots

if TYPE_CHECKING:
    from jaxsparse.embedding import EmbeddingCollection


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("slabs", "slots", "learning_rates", "init_words"),
    meta_fields=("layout",),
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

    layout: str
    """Static: fingerprint of the layout the rows lie in."""

    init_words: jax.Array | None = None
    """``[2]`` uint32: the key that `init` got, from which rows that come later are drawn. Only
    where some table has rows that come and go."""

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
        new = jax.device_put(np.float32(rate), old.sharding)
        return dataclasses.replace(self, learning_rates={**self.learning_rates, table: new})


def state_spec(
    layout: Layout, axes: tuple[str, ...], slots: tuple[tuple[str, ...], ...], fingerprint: str
) -> EmbeddingState:
    """PartitionSpec of every leaf, given the slot names of each slab."""
    whole: Any = PartitionSpec()
    cuts: list[Any] = [whole if slab.replicated else PartitionSpec(axes) for slab in layout.slabs]
    rates = {b.spec.name: whole for s in layout.slabs if s.trainable for b in s.tables}
    return EmbeddingState(
        slabs=tuple(cuts),
        slots=tuple({name: cut for name in names} for cut, names in zip(cuts, slots, strict=True)),
        learning_rates=rates,
        layout=fingerprint,
        init_words=whole if any(slab.is_stored for slab in layout.slabs) else None,
    )


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
