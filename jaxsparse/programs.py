# SPDX-License-Identifier: Apache-2.0
"""The compiled programs behind `EmbeddingCollection`: each one jit around one ``shard_map``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxsparse.initial_rows import init_slab
from jaxsparse.local import Residuals
from jaxsparse.packed import PackedIds
from jaxsparse.pooling import Activations
from jaxsparse.row_grads import RowGrads
from jaxsparse.state import EmbeddingState, read_rows, write_rows

if TYPE_CHECKING:
    from jaxsparse.embedding import EmbeddingCollection

WHOLE = PartitionSpec()


def _cut(emb: EmbeddingCollection) -> PartitionSpec:
    return PartitionSpec(emb.axes)


def _on_mesh(
    emb: EmbeddingCollection, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    # check_vma is off: a replicated slab is updated alike on every device from gathered
    # gradients, which the checker cannot know.
    return jax.shard_map(
        function, mesh=emb.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


@partial(jax.jit, static_argnums=0)
def init_arrays(emb: EmbeddingCollection, key: jax.Array, rates: Any) -> EmbeddingState:
    """The state; made inside jit, so that it may be donated.

    Learning rates are copied: on CPU ``device_put`` may let all devices borrow one numpy scalar.
    """

    def local(key: jax.Array, rates: Any) -> EmbeddingState:
        device = jax.lax.axis_index(emb.axes)
        slabs = tuple(init_slab(key, slab, device, emb.num_shards) for slab in emb.layout.slabs)
        slots = tuple(
            slab.optimizer.init_slots(slab.rows_per_shard, slab.dim) if slab.trainable else {}
            for slab in emb.layout.slabs
        )
        words = jax.random.key_data(key) if emb.stored_tables else None
        rates = jax.tree.map(jnp.copy, rates)
        return EmbeddingState(slabs, slots, rates, emb.layout_fingerprint, words)

    state: EmbeddingState = _on_mesh(emb, local, (WHOLE, WHOLE), emb.state_spec())(key, rates)
    return state


@partial(jax.jit, static_argnums=0)
def lookup(emb: EmbeddingCollection, state: EmbeddingState, ids: PackedIds) -> Any:
    """Activations, and the two parts of `Residuals` that are not ids."""

    def local(state: EmbeddingState, ids: PackedIds) -> Any:
        acts, residuals = emb.local.lookup(state, ids)
        return acts, residuals.asked, residuals.vectors

    cut = _cut(emb)
    specs = (emb.state_spec(), emb.ids_spec(ids))
    return _on_mesh(emb, local, specs, (cut, cut, cut))(state, ids)


def _residuals_spec(emb: EmbeddingCollection, residuals: Residuals) -> Residuals:
    cut = _cut(emb)
    spec: Residuals = jax.tree.map(lambda _: cut, residuals)
    return dataclasses.replace(spec, ids=emb.ids_spec(residuals.ids))


@partial(jax.jit, static_argnums=0)
def row_grads(emb: EmbeddingCollection, residuals: Residuals, grads: Activations) -> Any:
    """`RowGrads` of all devices."""
    trainable = [slab for slab in emb.layout.slabs if slab.trainable]
    cuts: Any = tuple(WHOLE if slab.replicated else _cut(emb) for slab in trainable)
    out = RowGrads(
        rows=cuts,
        grads=cuts,
        num_rows=tuple(slab.rows_per_shard for slab in trainable),
        replicated=tuple(slab.replicated for slab in trainable),
        axes=emb.axes,
        path=emb.path,
        mesh=None,
    )
    specs = (_residuals_spec(emb, residuals), _cut(emb))
    return _on_mesh(emb, emb.local.row_grads, specs, out)(residuals, grads)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def apply(
    emb: EmbeddingCollection,
    state: EmbeddingState,
    row_grads: RowGrads,
    step: jax.Array,
    enabled: jax.Array,
) -> Any:
    """The state after one update of each touched row, in place."""
    row_grads = dataclasses.replace(row_grads, mesh=None)
    specs = (emb.state_spec(), row_grads.spec(), WHOLE, WHOLE)
    return _on_mesh(emb, emb.local.apply, specs, specs[0])(state, row_grads, step, enabled)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def update(
    emb: EmbeddingCollection,
    state: EmbeddingState,
    residuals: Residuals,
    grads: Activations,
    step: jax.Array,
    enabled: jax.Array,
) -> Any:
    """`row_grads` and `apply` in one."""
    spec = emb.state_spec()
    specs = (spec, _residuals_spec(emb, residuals), _cut(emb), WHOLE, WHOLE)
    return _on_mesh(emb, emb.local.update, specs, spec)(state, residuals, grads, step, enabled)


@partial(jax.jit, static_argnums=0)
def weight_buffers(emb: EmbeddingCollection, residuals: Residuals, grads: Activations) -> Any:
    """By slab, gradients of per-id weights in buffer order ``[N * M']``; None without weights."""
    specs = (_residuals_spec(emb, residuals), _cut(emb))
    return _on_mesh(emb, emb.local.weight_grads, specs, _cut(emb))(residuals, grads)


@partial(jax.jit, static_argnums=0)
def weight_grads(
    emb: EmbeddingCollection, residuals: Residuals, grads: Activations
) -> dict[str, jax.Array]:
    """Gradients of per-id weights in the order of the user's values, padded to a bucket."""
    by_slab = weight_buffers(emb, residuals, grads)
    return {
        # A buffer is empty where padding was all there was; XLA gathers nothing from nothing.
        name: values.at[slots].get(mode="fill", fill_value=0)
        if values.size
        else jnp.zeros(slots.shape, jnp.float32)
        for ids, values in zip(residuals.ids.slabs, by_slab, strict=True)
        for name, slots in ids.value_slots.items()
    }


@partial(jax.jit, static_argnums=(0, 1))
def gather_rows(
    emb: EmbeddingCollection, replicated: bool, array: jax.Array, owner: Any, row: Any
) -> Any:
    """Rows ``[n, ...]`` on every device, by owner and local row."""
    local = partial(read_rows, emb=emb, replicated=replicated)
    specs = (WHOLE if replicated else _cut(emb), WHOLE, WHOLE)
    return _on_mesh(emb, local, specs, WHOLE)(array, owner, row)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def scatter_rows(
    emb: EmbeddingCollection,
    replicated: bool,
    array: jax.Array,
    owner: Any,
    row: Any,
    values: Any,
) -> Any:
    """The slab with rows ``[n, D]`` overwritten, in place."""
    local = partial(write_rows, emb=emb, replicated=replicated)
    cut = WHOLE if replicated else _cut(emb)
    return _on_mesh(emb, local, (cut, WHOLE, WHOLE, WHOLE), cut)(array, owner, row, values)
