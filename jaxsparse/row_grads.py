# SPDX-License-Identifier: Apache-2.0
"""`RowGrads`: the sparse gradient of a step, one entry per touched row."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxsparse.exchange import merge_rows
from jaxsparse.ops.paths import Path


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("rows", "grads"),
    meta_fields=("num_rows", "replicated", "axes", "path", "mesh"),
)
@dataclasses.dataclass(frozen=True)
class RowGrads:
    """Distinct rows and their summed gradients, by trainable slab."""

    rows: tuple[jax.Array, ...]
    """``[N * K]`` int32 local rows of each device, padded with R; ``[K]`` when replicated."""
    grads: tuple[jax.Array, ...]
    """``[N * K, D]`` float32; ``[K, D]`` when replicated."""
    num_rows: tuple[int, ...]
    """R of each slab."""
    replicated: tuple[bool, ...]
    axes: tuple[str, ...]
    path: Path
    """Which kernels merge them."""
    mesh: Mesh | None
    """None for the per-device blocks inside a ``shard_map``."""

    def spec(self) -> RowGrads:
        """PartitionSpec of every leaf."""
        cuts = tuple(PartitionSpec() if r else PartitionSpec(self.axes) for r in self.replicated)
        return dataclasses.replace(self, rows=cuts, grads=cuts)  # type: ignore[arg-type]


def merge_row_grads(first: RowGrads, second: RowGrads) -> RowGrads:
    """Adds two sparse gradients of the same collection: one entry per row touched by either.

    Accumulating over micro-batches this way and applying once is one update per row
    (`EmbeddingCollection.apply`), as if the batches had been one.

    Raises:
        ValueError: the gradients come from different collections or mix global and local ones.
    """
    if (first.num_rows, first.mesh) != (second.num_rows, second.mesh):
        raise ValueError(
            "merge_row_grads: both must come from the same collection and the same side of "
            f"shard_map, got slabs {first.num_rows} and {second.num_rows}"
        )
    if first.mesh is None:
        return _merge_local(first, second)
    merged: RowGrads = _merge_global(first, second)
    return merged


@jax.jit
def _merge_global(first: RowGrads, second: RowGrads) -> RowGrads:
    specs = (first.spec(), second.spec())
    merged: RowGrads = jax.shard_map(
        _merge_local, mesh=first.mesh, in_specs=specs, out_specs=specs[0], check_vma=False
    )(first, second)
    return merged


def _merge_local(first: RowGrads, second: RowGrads) -> RowGrads:
    merged = [
        merge_rows(jnp.concatenate([r1, r2]), jnp.concatenate([g1, g2]), num_rows, first.path)
        for r1, r2, g1, g2, num_rows in zip(
            first.rows, second.rows, first.grads, second.grads, first.num_rows, strict=True
        )
    ]
    return dataclasses.replace(
        first, rows=tuple(rows for rows, _ in merged), grads=tuple(grads for _, grads in merged)
    )


def row_grads_norm(row_grads: RowGrads) -> jax.Array:
    """L2 norm over all touched rows of all slabs, float32 scalar; for global clipping.

    Inside a ``shard_map`` the result is the norm over all devices as well.
    """
    total = jnp.float32(0)
    for grads, replicated in zip(row_grads.grads, row_grads.replicated, strict=True):
        squares = jnp.sum(jnp.square(grads))
        if row_grads.mesh is None and not replicated:
            squares = lax.psum(squares, row_grads.axes)
        total = total + squares
    return jnp.sqrt(total)


def scale_row_grads(row_grads: RowGrads, factor: jax.Array | float) -> RowGrads:
    """Multiplies all gradients by one factor."""
    return dataclasses.replace(row_grads, grads=tuple(g * factor for g in row_grads.grads))
