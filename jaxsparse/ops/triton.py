# SPDX-License-Identifier: Apache-2.0
"""What the Pallas kernels for GPUs share: tiles of rows, masked access, the launch.

A kernel's program holds a tile of a few rows and all their columns, padded to a power of two. The
Triton backend of Pallas is deprecated since jax 0.11: this module alone names it, and only when a
kernel is traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

MAX_DIM = 1024
"""Most columns a tile has."""

TILE_ELEMENTS = 1024
"""Elements of a tile: 8 of each of 128 threads, so that one access moves 16 bytes of bfloat16."""

MAX_TILE_ROWS = 128
"""Most rows of a tile, for tables that are a few columns wide."""

NUM_WARPS = 4

Ref = Any
"""A reference to an array in the GPU's memory, as kernels are given."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows and columns that one program works on."""

    rows: int
    columns: int
    """Power of two, at least ``dim``."""
    dim: int

    def row_numbers(self) -> jax.Array:
        """``[rows]`` int32: this program's, one after the other over all programs."""
        return pl.program_id(0) * self.rows + jnp.arange(self.rows, dtype=jnp.int32)

    def zeros(self) -> jax.Array:
        """``[rows, columns]`` float32."""
        return jnp.zeros((self.rows, self.columns), jnp.float32)

    def load(self, ref: Ref, rows: jax.Array, mask: jax.Array) -> jax.Array:
        """Rows of ``ref [N, dim]``; zeros where ``mask [rows]`` is False and past ``dim``."""
        return masked_load(*self._access(ref, rows, mask))

    def store(self, ref: Ref, rows: jax.Array, mask: jax.Array, values: jax.Array) -> None:
        """Writes rows of ``ref [N, dim]`` where ``mask [rows]`` is True."""
        at, inside = self._access(ref, jnp.where(mask, rows, ref.shape[0]), mask)
        masked_store(at, inside, values)

    def _access(self, ref: Ref, rows: jax.Array, mask: jax.Array) -> tuple[Ref, jax.Array]:
        columns = jnp.arange(self.columns, dtype=jnp.int32)[None, :]
        inside = jnp.broadcast_to(mask[:, None], (rows.shape[0], self.columns))
        if self.dim < self.columns:
            inside = inside & (columns < self.dim)
        return ref.at[rows[:, None], columns], inside


def make_tile(op: str, dim: int, num_rows: int) -> Tile:
    """The tile for rows of ``dim`` columns, of which there are ``num_rows``.

    Raises:
        ValueError: ``dim`` is not within ``[1, MAX_DIM]``.
    """
    if not 1 <= dim <= MAX_DIM:
        raise ValueError(
            f"{op}: implementation 'triton' takes 1 to {MAX_DIM} columns, got {dim}; "
            "use implementation='xla'"
        )
    columns = pl.next_power_of_2(dim)
    # Single columns are loaded one by one, each by an address that takes registers.
    elements = TILE_ELEMENTS if dim % 4 == 0 else TILE_ELEMENTS // 2
    most = min(MAX_TILE_ROWS, max(pl.next_power_of_2(max(num_rows, 1)), 16))
    return Tile(max(min(elements // columns, most), 1), columns, dim)


def load_at(ref: Ref, index: jax.Array, mask: jax.Array, other: int | float = 0) -> jax.Array:
    """Entries of ``ref [N]``; ``other`` where ``mask`` is False. All of one shape."""
    return masked_load(ref.at[index], mask, other)


def store_at(ref: Ref, index: jax.Array, mask: jax.Array, values: jax.Array) -> None:
    """Writes entries of ``ref [N]`` where ``mask`` is True. All of one shape."""
    masked_store(ref.at[jnp.where(mask, index, ref.shape[0])], mask, values)


def masked_load(at: Ref, mask: jax.Array, other: int | float = 0) -> jax.Array:
    """What lies at a reference with indices; ``other`` where ``mask`` is False."""
    loaded: jax.Array = _backend().load(at, mask=mask, other=jnp.asarray(other, at.dtype))
    return loaded


def masked_store(at: Ref, mask: jax.Array, values: jax.Array) -> None:
    """Writes to a reference with indices where ``mask`` is True.

    The interpreter also writes masked entries, with their old values. Their indices must be
    outside the array, or they undo what others write there.
    """
    _backend().store(at, values, mask=mask)


def launch(
    kernel: Callable[..., None],
    *arguments: Any,
    name: str,
    out_shape: Any,
    num_programs: int,
    aliases: dict[int, int] | None = None,
    num_warps: int = NUM_WARPS,
    interpret: bool = False,
) -> Any:
    """Runs ``num_programs`` programs of a kernel.

    Args:
        kernel: of references to the arguments and to the results, as pytrees.
        arguments: arrays, or pytrees of them.
        name: of the function in the compiled program.
        out_shape: shape and dtype of the results, a pytree.
        num_programs: at least 1.
        aliases: from number of an argument's leaf to that of the result it becomes, in place.
        num_warps: of 32 threads, a program.
        interpret: True runs the kernel without a GPU, as jax operations.
    """
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=(num_programs,),
        input_output_aliases=aliases or {},
        # Loads depend on loads here, which pipelining does not help.
        compiler_params=_backend().CompilerParams(num_warps=num_warps, num_stages=1),
        name=name,
        interpret=interpret,
    )(*arguments)


def _backend() -> Any:
    """Imported late: whoever has no GPU does without it, should a jax of the future have none."""
    from jax.experimental.pallas import triton

    return triton
