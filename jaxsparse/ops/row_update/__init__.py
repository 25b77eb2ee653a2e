# SPDX-License-Identifier: Apache-2.0
"""A rule applied to the touched rows of a table, in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.ops.platforms import Implementation, run_on_platform
from jaxsparse.ops.row_update.cpu import count_not_finite_native, is_fused, row_update_native
from jaxsparse.ops.row_update.gpu import count_not_finite_triton, row_update_triton
from jaxsparse.ops.row_update.tables import RowTables
from jaxsparse.ops.row_update.xla import NATIVE_ROWS, XLA_ROWS, MovedRows, RowAccess
from jaxsparse.ops.segment_sum import BagGradients
from jaxsparse.ops.shapes import Shapes

__all__ = [
    "NATIVE_ROWS",
    "XLA_ROWS",
    "MovedRows",
    "RowAccess",
    "RowTables",
    "count_not_finite",
    "is_fused",
    "row_update",
]

Slots = dict[str, jax.Array]


def row_update(
    rule: Any,
    slab: jax.Array,
    slots: Slots,
    rows: jax.Array,
    grads: jax.Array | BagGradients,
    rates: jax.Array | RowTables,
    step: jax.Array | int,
    enabled: jax.Array | bool = True,
    noise_rows: jax.Array | None = None,
    seed: int = 0,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, Slots]:
    """Moves distinct rows once; in place where slab and slots are donated.

    bfloat16 rows are rounded at random (`jaxsparse.ops.quantize`), by (seed, step, noise row,
    column). The native kernel has the formulas of the shipped rules; it asks any other rule
    between reading and writing its rows.

    Args:
        rule: a `SparseOptimizer`.
        slab: ``[R, D]`` float32 or bfloat16.
        slots: by name ``[R, D]`` or ``[R]``.
        rows: ``[K]`` int32 distinct; those outside ``[0, R)`` stand for nothing.
        grads: ``[K, D]`` float32, or sums to be made: ``native`` with a shipped rule makes and uses
            them a few rows at a time, all others make them first.
        rates: ``[K]`` float32 learning rate of each row, or the slab's tables.
        step: int32 global step.
        enabled: False changes no bit.
        noise_rows: ``[K]`` uint32; None takes ``rows``, or what ``rates`` says of its tables.
        seed: of the rounding, in [0, 2^32).
        implementation: ``xla``, ``native`` or ``triton``; None for the best.

    Returns:
        The new slab and slots.

    Raises:
        ValueError: shapes or dtypes are others, a slot of the rule is missing, or there is no such
            implementation.
        RuntimeError: the native one is asked for and is not there.

    >>> from jaxsparse.optimizers import SGD
    >>> slab, _ = row_update(SGD(0.5), jnp.zeros((3, 1)), {}, jnp.array([2, 3]), jnp.ones((2, 1)),
    ...                      jnp.full((2,), 0.5), step=0)
    >>> slab.tolist()
    [[0.0], [0.0], [-0.5]]
    """
    kernels: dict[str, Implementation] = {
        "xla": partial(_update_by_rows, XLA_ROWS, rule, seed),
        "native": partial(row_update_native, rule, seed)
        if is_fused(rule)
        else partial(_update_by_rows, NATIVE_ROWS, rule, seed),
        "triton": partial(row_update_triton, rule, seed)
        if is_fused(rule)
        else partial(_update_by_rows, XLA_ROWS, rule, seed),
    }
    given = (slab, slots, rows, grads, _tables(rates, rows, noise_rows), jnp.int32(step))
    args = jax.tree.map(jnp.asarray, given)
    flag = jnp.asarray(enabled, bool)
    _check("row_update", rule, *args)
    Shapes("row_update").check("enabled", flag, "", bool)
    if isinstance(grads, BagGradients) and not (implementation == "native" and is_fused(rule)):
        args = (slab, slots, rows, grads.sum(implementation), *args[4:])
    new: tuple[jax.Array, Slots] = run_on_platform(
        "row_update", implementation, kernels, *args, flag
    )
    return new


def count_not_finite(
    rule: Any,
    slab: jax.Array,
    slots: Slots,
    rows: jax.Array,
    grads: jax.Array,
    rates: jax.Array | RowTables,
    step: jax.Array | int,
    noise_rows: jax.Array | None = None,
    seed: int = 0,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Rows that `row_update` of the same arguments would leave with a NaN or infinity; int32.

    Of floating-point slots too: an accumulator that has become infinite holds its row for ever.

    Args:
        rule: as for `row_update`, like all others.
        slab: ``[R, D]``.
        slots: by name.
        rows: ``[K]``.
        grads: ``[K, D]``.
        rates: ``[K]``, or tables.
        step: global step.
        noise_rows: ``[K]``, or None.
        seed: of the rounding.
        implementation: ``xla``, ``native`` or ``triton``; None for the best.

    Raises:
        ValueError: shapes or dtypes are others, a slot of the rule is missing, or there is no such
            implementation.
        RuntimeError: the native one is asked for and is not there.
    """
    kernels: dict[str, Implementation] = {
        "xla": partial(_count_by_rows, XLA_ROWS, rule, seed),
        "native": partial(count_not_finite_native, rule, seed)
        if is_fused(rule)
        else partial(_count_by_rows, NATIVE_ROWS, rule, seed),
        "triton": partial(count_not_finite_triton, rule, seed)
        if is_fused(rule)
        else partial(_count_by_rows, XLA_ROWS, rule, seed),
    }
    given = (slab, slots, rows, grads, _tables(rates, rows, noise_rows), jnp.int32(step))
    args = jax.tree.map(jnp.asarray, given)
    _check("count_not_finite", rule, *args)
    count: jax.Array = run_on_platform("count_not_finite", implementation, kernels, *args)
    return count


def _tables(
    rates: jax.Array | RowTables, rows: jax.Array, noise_rows: jax.Array | None
) -> RowTables:
    """Tables, or rates and noise by entry: then there are no starts."""
    if isinstance(rates, RowTables):
        return rates
    noise = rows if noise_rows is None else noise_rows
    return RowTables(jnp.zeros((0,), jnp.int32), rates, noise.astype(jnp.uint32))


def _check(
    op: str,
    rule: Any,
    slab: jax.Array,
    slots: Slots,
    rows: jax.Array,
    grads: jax.Array | BagGradients,
    tables: RowTables,
    step: jax.Array,
) -> None:
    """Raises where the arguments of an operation do not fit together."""
    if isinstance(grads, BagGradients):
        grads.check()
    shapes = Shapes(op)
    shapes.check("slab", slab, "R, D", jnp.float32, jnp.bfloat16)
    shapes.check("rows", rows, "K", jnp.int32)
    shapes.check("grads", grads, "K, D", jnp.float32)
    by = "T" if tables.starts.shape[0] else "K"
    shapes.check("starts", tables.starts, "_", jnp.int32)
    shapes.sizes["T"] = tables.starts.shape[0]
    shapes.check("rates", tables.rates, by, jnp.float32)
    shapes.check("noise", tables.noise, by, jnp.uint32)
    shapes.check("step", step, "", jnp.int32)
    if not is_fused(rule):
        return
    for name, slot in jax.eval_shape(partial(rule.init_slots, *slab.shape)).items():
        if name not in slots:
            raise ValueError(f"{op}: {rule} has the slot {name!r}, got {sorted(slots)}")
        shapes.check(f"slot {name!r}", slots[name], ("R", "R, D")[slot.ndim - 1], slot.dtype)


def _by_entry(tables: RowTables, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    return tables.of(rows) if tables.starts.shape[0] else (tables.rates, tables.noise)


def _move(
    access: RowAccess,
    rule: Any,
    seed: int,
    slab: jax.Array,
    slots: Slots,
    rows: jax.Array,
    grads: jax.Array,
    tables: RowTables,
    step: jax.Array,
) -> MovedRows:
    rates, noise = _by_entry(tables, rows)
    return access.move(rule, slab, slots, rows, grads, rates, step, noise, seed)


def _update_by_rows(
    access: RowAccess, rule: Any, seed: int, slab: jax.Array, slots: Slots, *args: Any
) -> tuple[jax.Array, Slots]:
    *inputs, enabled = args
    moved = _move(access, rule, seed, slab, slots, *inputs)
    return access.put(moved, slab, slots, enabled)


def _count_by_rows(
    access: RowAccess, rule: Any, seed: int, slab: jax.Array, *args: Any
) -> jax.Array:
    return _move(access, rule, seed, slab, *args).num_not_finite(slab.shape[0])
