# SPDX-License-Identifier: Apache-2.0
"""The compiled programs behind `EmbeddingCollection`: each one jit around one ``shard_map``."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from jaxsparse.local import Residuals
from jaxsparse.packed import PackedIds
from jaxsparse.pooling import Activations
from jaxsparse.row_grads import RowGrads
from jaxsparse.state import EmbeddingState, init_slab, read_rows, write_rows

if TYPE_CHECKING:
    from jaxsparse.embedding import EmbeddingCollection

_WHOLE = PartitionSpec()


def _cut(emb: EmbeddingCollection) -> PartitionSpec:
    return PartitionSpec(emb.axes)


def _shard_map(emb: EmbeddingCollection, function, in_specs, out_specs):  # type: ignore[no-untyped-def]
    # check_vma is off: a replicated slab is updated alike on every device from gathered
    # gradients, which the checker cannot know.
    return jax.shard_map(
        function, mesh=emb.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


@partial(jax.jit, static_argnums=0)
def init_arrays(emb: EmbeddingCollection, key: jax.Array):  # type: ignore[no-untyped-def]
    def local(key: jax.Array):  # type: ignore[no-untyped-def]
        device = jax.lax.axis_index(emb.axes)
        slabs = tuple(init_slab(key, slab, device) for slab in emb.layout.slabs)
        slots = tuple(
            slab.optimizer.init_slots(slab.rows_per_shard, slab.dim) if slab.trainable else {}
            for slab in emb.layout.slabs
        )
        return slabs, slots

    spec = emb.state_spec()
    return _shard_map(emb, local, (_WHOLE,), (spec.slabs, spec.slots))(key)


@partial(jax.jit, static_argnums=0)
def lookup(emb: EmbeddingCollection, state: EmbeddingState, ids: PackedIds):  # type: ignore[no-untyped-def]
    def local(state: EmbeddingState, ids: PackedIds):  # type: ignore[no-untyped-def]
        acts, residuals = emb.local.lookup(state, ids)
        return acts, residuals.asked, residuals.vectors

    cut = _cut(emb)
    specs = (emb.state_spec(), emb.ids_spec(ids))
    return _shard_map(emb, local, specs, (cut, cut, cut))(state, ids)


def _residuals_spec(emb: EmbeddingCollection, residuals: Residuals) -> Residuals:
    cut = _cut(emb)
    spec = jax.tree.map(lambda _: cut, residuals)
    return dataclasses.replace(spec, ids=emb.ids_spec(residuals.ids))


@partial(jax.jit, static_argnums=0)
def row_grads(emb: EmbeddingCollection, residuals: Residuals, grads: Activations) -> RowGrads:
    trainable = [slab for slab in emb.layout.slabs if slab.trainable]
    cuts = tuple(_WHOLE if slab.replicated else _cut(emb) for slab in trainable)
    out = RowGrads(
        rows=cuts,  # type: ignore[arg-type]
        grads=cuts,  # type: ignore[arg-type]
        num_rows=tuple(slab.rows_per_shard for slab in trainable),
        replicated=tuple(slab.replicated for slab in trainable),
        axes=emb.axes,
        mesh=None,
    )
    specs = (_residuals_spec(emb, residuals), _cut(emb))
    result: RowGrads = _shard_map(emb, emb.local.row_grads, specs, out)(residuals, grads)
    return result


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def apply(
    emb: EmbeddingCollection,
    state: EmbeddingState,
    row_grads: RowGrads,
    step: jax.Array,
    enabled: jax.Array,
) -> EmbeddingState:
    row_grads = dataclasses.replace(row_grads, mesh=None)
    specs = (emb.state_spec(), row_grads.spec(), _WHOLE, _WHOLE)
    result: EmbeddingState = _shard_map(emb, emb.local.apply, specs, specs[0])(
        state, row_grads, step, enabled
    )
    return result


@partial(jax.jit, static_argnums=0)
def weight_grads(emb: EmbeddingCollection, residuals: Residuals, grads: Activations):  # type: ignore[no-untyped-def]
    specs = (_residuals_spec(emb, residuals), _cut(emb))
    by_slab = _shard_map(emb, emb.local.weight_grads, specs, _cut(emb))(residuals, grads)
    return {
        name: values.at[slots].get(mode="fill", fill_value=0)
        for ids, values in zip(residuals.ids.slabs, by_slab, strict=True)
        for name, slots in ids.value_slots.items()
    }


@partial(jax.jit, static_argnums=(0, 1))
def gather_rows(emb: EmbeddingCollection, replicated: bool, array, owner, row):  # type: ignore[no-untyped-def]
    local = partial(read_rows, emb=emb, replicated=replicated)
    specs = (_WHOLE if replicated else _cut(emb), _WHOLE, _WHOLE)
    return _shard_map(emb, local, specs, _WHOLE)(array, owner, row)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def scatter_rows(emb: EmbeddingCollection, replicated: bool, array, owner, row, values):  # type: ignore[no-untyped-def]
    local = partial(write_rows, emb=emb, replicated=replicated)
    cut = _WHOLE if replicated else _cut(emb)
    return _shard_map(emb, local, (cut, _WHOLE, _WHOLE, _WHOLE), cut)(array, owner, row, values)
