# SPDX-License-Identifier: Apache-2.0
"""`row_update` on the CPU, in C++: shipped rules as one pass over the touched rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.ops.native.arguments import or_empty, presence
from jaxsparse.ops.row_update.tables import RowTables
from jaxsparse.ops.segment_sum import BagGradients
from jaxsparse.optimizers import SGD, Adagrad, Adam, Ftrl, RowwiseAdagrad

HANDLERS = (
    "jaxsparse_row_update",
    "jaxsparse_count_not_finite",
    "jaxsparse_read_rows",
    "jaxsparse_write_rows",
    "jaxsparse_row_update_by_bags",
)

# Exact types, in the order of `RuleKind` in rules.h: a subclass may have another formula.
_RULES: dict[type, tuple[str, ...]] = {
    SGD: (),
    Adagrad: ("accumulator",),
    RowwiseAdagrad: ("accumulator",),
    Adam: ("m", "v"),
    Ftrl: ("z", "n"),
}

Slots = dict[str, jax.Array]


def is_fused(rule: Any) -> bool:
    """Whether the kernel knows a rule's formula."""
    return type(rule) in _RULES


def row_update_native(
    rule: Any,
    seed: int,
    slab: jax.Array,
    slots: Slots,
    rows: jax.Array,
    grads: jax.Array | BagGradients,
    tables: RowTables,
    step: jax.Array,
    enabled: jax.Array,
) -> tuple[jax.Array, Slots]:
    """`row_update` of a rule that `is_fused`; in place where slab and slots are donated.

    ``tables`` without ``starts`` has rates and noise by entry of ``rows``. `BagGradients` are
    summed as they are used: the array of sums is never written.
    """
    names = _slot_names(rule)
    arrays = [slab, *(slots[name] for name in names)]
    inputs: tuple[Any, ...]
    of_tables = tables.starts, tables.rates, tables.noise, step, enabled
    if isinstance(grads, BagGradients):
        handler, parts = HANDLERS[4], grads.grads
        ids, weights = or_empty(grads.ids, np.int32), or_empty(grads.weights, np.float32)
        scale = or_empty(grads.scale, np.float32)
        inputs = (rows, grads.offsets, grads.bags, ids, weights, scale, *of_tables)
        present = presence(grads.bags, grads.weights, grads.scale)
        attributes = {"present": present, **_attributes(rule, seed)}
    else:
        handler, parts = HANDLERS[0], ()
        inputs = (rows, grads, *of_tables)
        attributes = _attributes(rule, seed)
    call = jax.ffi.ffi_call(
        handler,
        [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
        input_output_aliases={len(inputs) + index: index for index in range(len(arrays))},
    )
    new_slab, *new_slots = call(*inputs, *arrays, *parts, **attributes)
    return new_slab, dict(zip(names, new_slots, strict=True))


def count_not_finite_native(
    rule: Any,
    seed: int,
    slab: jax.Array,
    slots: Slots,
    rows: jax.Array,
    grads: jax.Array,
    tables: RowTables,
    step: jax.Array,
) -> jax.Array:
    """`count_not_finite` of a rule that `is_fused`."""
    arrays = [slab, *(slots[name] for name in _slot_names(rule))]
    shape = jax.ShapeDtypeStruct((), jnp.int32)
    call = jax.ffi.ffi_call(HANDLERS[1], shape, vmap_method="sequential")
    inputs = rows, grads, tables.starts, tables.rates, tables.noise, step
    count: jax.Array = call(*inputs, *arrays, **_attributes(rule, seed))
    return count


def read_rows_native(array: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows ``[K, ...]`` of an array, zeros for those outside of it."""
    shape = jax.ShapeDtypeStruct((rows.shape[0], *array.shape[1:]), array.dtype)
    values: jax.Array = jax.ffi.ffi_call(HANDLERS[2], shape, vmap_method="sequential")(array, rows)
    return values


def write_rows_native(
    array: jax.Array, rows: jax.Array, values: jax.Array, enabled: jax.Array
) -> jax.Array:
    """The array with distinct rows overwritten, in place where it is donated."""
    shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
    call = jax.ffi.ffi_call(HANDLERS[3], shape, input_output_aliases={0: 0})
    written: jax.Array = call(array, rows, values, enabled)
    return written


def _slot_names(rule: Any) -> tuple[str, ...]:
    """Slots in the order the kernel takes them."""
    names = _RULES[type(rule)]
    if getattr(rule, "per_row_count", False):
        names = (*names, "count")
    if getattr(rule, "catch_up_decay", False):
        names = (*names, "last_step")
    return names


def _attributes(rule: Any, seed: int) -> dict[str, Any]:
    """Rule and hyper-parameters, in the order of `options_of` in cpu.cc."""
    own_l2 = isinstance(rule, Ftrl)
    options = [
        0.0 if own_l2 else rule.l2,
        getattr(rule, "weight_decay", 0.0),
        getattr(rule, "catch_up_decay", False),
        getattr(rule, "per_row_count", False),
        getattr(rule, "eps", 0.0),
        getattr(rule, "b1", 0.0),
        getattr(rule, "b2", 0.0),
        getattr(rule, "beta", 0.0),
        getattr(rule, "l1", 0.0),
        rule.l2 if own_l2 else 0.0,
    ]
    return {
        "kind": list(_RULES).index(type(rule)),
        "options": np.array(options, np.float64),
        "seed": int(seed),
    }
