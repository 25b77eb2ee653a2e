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
        ValueError: there is no such implementation.
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
    if isinstance(grads, BagGradients) and not (implementation == "native" and is_fused(rule)):
        grads = grads.sum(implementation)
    args = (slab, slots, rows, grads, _tables(rates, rows, noise_rows), jnp.int32(step))
    new: tuple[jax.Array, Slots] = run_on_platform(
        "row_update", implementation, kernels, *args, jnp.asarray(enabled, bool)
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
        ValueError: there is no such implementation.
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
    args = (slab, slots, rows, grads, _tables(rates, rows, noise_rows), jnp.int32(step))
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
