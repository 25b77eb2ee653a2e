# SPDX-License-Identifier: Apache-2.0
"""A rule applied to touched rows on a GPU: rows and slots are read and written once, in place.

The kernel runs the rule's own ``update`` on a tile of rows, so a rule's formula is written once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxsparse.ops.quantize import mix32, step_key, stochastic_bits
from jaxsparse.ops.row_update.cpu import is_fused
from jaxsparse.ops.row_update.tables import RowTables
from jaxsparse.ops.triton import Ref, Tile, launch, load_at, make_tile, store_at
from jaxsparse.optimizers import RowwiseAdagrad

Slots = dict[str, Any]


def row_update_triton(
    rule: Any,
    seed: int,
    slab: jax.Array,
    slots: dict[str, jax.Array],
    rows: jax.Array,
    grads: jax.Array,
    tables: RowTables,
    step: jax.Array,
    enabled: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`row_update` of a rule that `is_fused`; in place where slab and slots are donated.

    Args:
        rule: a shipped one; a rule of a user's own may use anything of jax, and a tile has
            columns of zeros past the last.
        seed: of the rounding of bfloat16 rows, in [0, 2^32).
        slab: ``[R, D]`` float32 or bfloat16.
        slots: by name ``[R, D]`` or ``[R]``.
        rows: ``[K]`` int32, distinct; those outside ``[0, R)`` stand for nothing.
        grads: ``[K, D]`` float32.
        tables: of the slab; without ``starts``, rates and noise by entry of ``rows``.
        step: int32 scalar.
        enabled: bool scalar; False changes no bit.
        interpret: True runs without a GPU.

    Returns:
        The new slab and slots.

    Raises:
        ValueError: the rule is not a shipped one, or rows are too wide for a tile.
    """
    update = _make("row_update", rule, slab, rows, seed)
    if 0 in (rows.shape[0], slab.shape[0]):
        return slab, slots
    state = {"slab": slab, "slots": slots}
    result = launch(
        update.kernel,
        state,
        update.inputs(rows, grads, tables, step, enabled),
        name="row_update",
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state),
        num_programs=update.num_programs,
        aliases={index: index for index in range(1 + len(slots))},
        interpret=interpret,
    )
    return result["slab"], result["slots"]


def count_not_finite_triton(
    rule: Any,
    seed: int,
    slab: jax.Array,
    slots: dict[str, jax.Array],
    rows: jax.Array,
    grads: jax.Array,
    tables: RowTables,
    step: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Rows that `row_update_triton` of the same arguments would make NaN or infinite; int32."""
    update = _make("count_not_finite", rule, slab, rows, seed)
    if 0 in (rows.shape[0], slab.shape[0]):
        return jnp.zeros((), jnp.int32)
    counts = launch(
        update.count_kernel,
        {"slab": slab, "slots": slots},
        update.inputs(rows, grads, tables, step, None),
        name="count_not_finite",
        out_shape=jax.ShapeDtypeStruct((update.num_programs,), jnp.int32),
        num_programs=update.num_programs,
        interpret=interpret,
    )
    total: jax.Array = jnp.sum(counts, dtype=jnp.int32)
    return total


@dataclasses.dataclass(frozen=True)
class _Update:
    """A rule on tiles of rows."""

    update: Callable[..., tuple[jax.Array, Slots]]
    tile: Tile
    num_entries: int
    num_programs: int
    rounded: bool
    """Whether weights are bfloat16."""
    seed: int

    def inputs(
        self,
        rows: jax.Array,
        grads: jax.Array,
        tables: RowTables,
        step: jax.Array,
        enabled: jax.Array | None,
    ) -> dict[str, jax.Array | None]:
        """What the kernel reads beside the state."""
        rates, noise = tables.of(rows) if tables.starts.shape[0] else (tables.rates, tables.noise)
        # Scalars one by one, as they are: XLA needs no program of its own to gather them.
        return {
            "rows": rows,
            "grads": grads,
            "rates": rates,
            "noise": noise if self.rounded else None,
            "step": step.reshape(1),
            "enabled": None if enabled is None else enabled.reshape(1),
        }

    def kernel(self, old: Slots, inputs: dict[str, Ref], new: Slots) -> None:
        """Writes what the rule makes of a tile."""
        rows, mask, moved, slots = self._moved(old, inputs)
        self.tile.store(new["slab"], rows, mask, moved)
        for name, ref in new["slots"].items():
            values = slots[name].astype(ref.dtype)
            if len(ref.shape) == 2:
                self.tile.store(ref, rows, mask, values)
            else:
                store_at(ref, rows, mask, values)

    def count_kernel(self, old: Slots, inputs: dict[str, Ref], counts: Ref) -> None:
        """Writes how many rows of a tile would not be finite."""
        _, mask, moved, slots = self._moved(old, inputs)
        bad = jnp.max((~jnp.isfinite(moved.astype(jnp.float32))).astype(jnp.int32), axis=1)
        for values in slots.values():
            if jnp.issubdtype(values.dtype, jnp.floating):
                worse = (~jnp.isfinite(values)).astype(jnp.int32)
                bad = jnp.maximum(bad, worse if worse.ndim == 1 else jnp.max(worse, axis=1))
        count = jnp.sum(jnp.where(mask, bad, 0), dtype=jnp.int32)
        counts[pl.program_id(0)] = count

    def _moved(
        self, old: Slots, inputs: dict[str, Ref]
    ) -> tuple[jax.Array, jax.Array, jax.Array, Slots]:
        """Rows ``[rows]``, whether they are any, and what becomes of weights and slots."""
        entries = self.tile.row_numbers()
        listed = entries < self.num_entries
        rows = load_at(inputs["rows"], entries, listed, -1)
        step = inputs["step"][0]
        mask = (rows >= 0) & (rows < old["slab"].shape[0])
        if inputs["enabled"] is not None:
            mask = mask & inputs["enabled"][0]

        def read(ref: Ref) -> jax.Array:
            if len(ref.shape) == 2:
                return self.tile.load(ref, rows, mask)
            return load_at(ref, rows, mask)

        moved, slots = self.update(
            read(old["slab"]).astype(jnp.float32),
            {name: read(ref) for name, ref in old["slots"].items()},
            self.tile.load(inputs["grads"], entries, mask),
            load_at(inputs["rates"], entries, mask)[:, None],
            step,
        )
        if self.rounded:
            noise = load_at(inputs["noise"], entries, mask)
            moved = self._round(moved, noise, step_key(jnp.uint32(self.seed), step))
        return rows, mask, moved, slots

    def _round(self, values: jax.Array, noise: jax.Array, key: jax.Array) -> jax.Array:
        """bfloat16, rounded at random as `stochastic_round_bf16` does."""
        row_keys = mix32(noise.astype(jnp.uint32) ^ key)
        columns = jnp.arange(self.tile.columns, dtype=jnp.uint32)
        bits = stochastic_bits(values, row_keys[:, None], columns[None, :])
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def _make(op: str, rule: Any, slab: jax.Array, rows: jax.Array, seed: int) -> _Update:
    if not is_fused(rule):
        raise ValueError(
            f"{op}: the kernel has the rules of jaxsparse.optimizers, got {type(rule).__name__}; "
            "use implementation='xla'"
        )
    num_entries = rows.shape[0]
    tile = make_tile(op, slab.shape[1], num_entries)
    update = rule.update
    if isinstance(rule, RowwiseAdagrad):
        update = partial(rule.update_padded, dim=tile.dim)
    num_programs = -(-num_entries // tile.rows)
    return _Update(update, tile, num_entries, num_programs, slab.dtype == jnp.bfloat16, seed)
