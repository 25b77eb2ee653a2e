# SPDX-License-Identifier: Apache-2.0
"""`row_update` of any rule: rows read, moved by the rule's own ``update``, and written.

What reads and writes are made of is a parameter: XLA's gather and scatter, or the native kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.ops.native.derivatives import derived_from
from jaxsparse.ops.quantize import stochastic_round_bf16
from jaxsparse.ops.row_update.cpu import read_rows_native, write_rows_native

Slots = dict[str, jax.Array]


@partial(jax.tree_util.register_dataclass, data_fields=("rows", "weights", "slots"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class MovedRows:
    """New values of touched rows, not yet written."""

    rows: jax.Array
    """``[K]`` int32 distinct rows; those outside ``[0, R)`` stand for nothing."""
    weights: jax.Array
    """``[K, D]`` in the slab's dtype, as they will be stored."""
    slots: Slots
    """By name, ``[K, D]`` or ``[K]``."""

    def num_not_finite(self, num_rows: int) -> jax.Array:
        """Rows of ``[0, num_rows)`` with a NaN or infinity in weights or slots; int32 scalar."""
        bad = jnp.zeros(self.rows.shape, bool)
        for values in (self.weights, *self.slots.values()):
            if jnp.issubdtype(values.dtype, jnp.floating):
                bad |= ~jnp.isfinite(values).all(axis=tuple(range(1, values.ndim)))
        inside = (self.rows >= 0) & (self.rows < num_rows)
        return jnp.sum(bad & inside, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class RowAccess:
    """How rows are read and written."""

    read: Callable[[jax.Array, jax.Array], jax.Array]
    """Of an array and rows; zeros for rows outside of it."""
    write: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
    """Of an array, distinct rows, values and ``enabled``."""
    rounding: str
    """Implementation of `stochastic_round_bf16`."""

    def move(
        self,
        rule: Any,
        slab: jax.Array,
        slots: Slots,
        rows: jax.Array,
        grads: jax.Array,
        rates: jax.Array,
        step: jax.Array,
        noise_rows: jax.Array,
        seed: int,
    ) -> MovedRows:
        """What the rule makes of touched rows; writes nothing. Arguments as of `row_update`.

        Raises:
            ValueError: the rule makes rows of another shape than it was given.
        """
        old = {name: self.read(slot, rows) for name, slot in slots.items()}
        weights = self.read(slab, rows).astype(jnp.float32)
        moved, new = rule.update(weights, old, grads, rates[:, None], step)
        for name, after, before in [("w", moved, weights), *((n, new[n], old[n]) for n in old)]:
            # Rows are written as they lie in memory: nothing is broadcast.
            if after.shape != before.shape:
                raise ValueError(
                    f"{type(rule).__name__}.update: {name} must be {list(before.shape)} as it was, "
                    f"got {list(after.shape)}"
                )
        if slab.dtype == jnp.bfloat16:
            moved = stochastic_round_bf16(
                moved, noise_rows, seed, step, implementation=self.rounding
            )
        new = {name: new[name].astype(slots[name].dtype) for name in slots}
        return MovedRows(rows, moved.astype(slab.dtype), new)

    def put(
        self, moved: MovedRows, slab: jax.Array, slots: Slots, enabled: jax.Array
    ) -> tuple[jax.Array, Slots]:
        """Writes moved rows and slots in place; ``enabled=False`` changes no bit."""

        def write(array: jax.Array, values: jax.Array) -> jax.Array:
            return self.write(array, moved.rows, values, enabled)

        return write(slab, moved.weights), {n: write(slots[n], moved.slots[n]) for n in slots}


def _read(array: jax.Array, rows: jax.Array) -> jax.Array:
    # A negative index would count from the end.
    return array.at[jnp.where(rows < 0, array.shape[0], rows)].get(mode="fill", fill_value=0)


def _write(array: jax.Array, rows: jax.Array, values: jax.Array, enabled: jax.Array) -> jax.Array:
    target = jnp.where(enabled & (rows >= 0), rows, array.shape[0])
    # Rows are distinct; those past the end (padding, or not enabled) are dropped.
    return array.at[target].set(values, mode="drop", unique_indices=True)


XLA_ROWS = RowAccess(_read, _write, "xla")
NATIVE_ROWS = RowAccess(derived_from(_read, read_rows_native), write_rows_native, "native")
