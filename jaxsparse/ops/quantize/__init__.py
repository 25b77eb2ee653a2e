# SPDX-License-Identifier: Apache-2.0
"""Fewer bits: rounding to bfloat16 at random without losing small updates, and int8 by row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxsparse.ops.platforms import run_on_platform
from jaxsparse.ops.quantize.cpu import stochastic_round_bf16_native
from jaxsparse.ops.quantize.xla import (
    dequantize_int8,
    mix32,
    quantize_int8,
    step_key,
    stochastic_bits,
    stochastic_round_bf16_xla,
)

__all__ = [
    "dequantize_int8",
    "mix32",
    "quantize_int8",
    "step_key",
    "stochastic_bits",
    "stochastic_round_bf16",
]


def stochastic_round_bf16(
    values: jax.Array,
    rows: jax.Array,
    seed: jax.Array | int,
    step: jax.Array | int,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Rounds to one of the two bfloat16 neighbours at random, so that the mean is the value.

    Updates far below a bfloat16's spacing then move rows as they should, on average. The noise is
    a function of (seed, step, row, column) and of nothing else: the same in every implementation,
    on resume, and wherever the row lies. What bfloat16 can hold stays as it is, infinity and NaN
    included; a value past the largest bfloat16 may become infinity.

    Args:
        values: ``[K, D]`` float32.
        rows: ``[K]`` int32 or uint32 row of the table each lies in.
        seed: uint32, the table's.
        step: int32, of the update.
        implementation: ``xla`` or ``native``; None for the best.

    Returns:
        ``[K, D]`` bfloat16.

    Raises:
        ValueError: shapes or dtypes are others, or there is no such implementation.
        RuntimeError: the native one is asked for and is not there.

    >>> rounded = stochastic_round_bf16(jnp.full((1000, 8), 1.001), jnp.arange(1000), 0, 0)
    >>> sorted(set(rounded.ravel().tolist()))
    [1.0, 1.0078125]
    >>> bool(abs(rounded.astype(jnp.float32).mean() - 1.001) < 1e-4)
    True
    """
    if values.ndim != 2 or values.dtype != jnp.float32:
        raise ValueError(
            "stochastic_round_bf16: values must be float32 [K, D], got "
            f"{values.dtype} {list(values.shape)}"
        )
    if rows.shape != values.shape[:1] or rows.dtype not in (jnp.int32, jnp.uint32):
        raise ValueError(
            f"stochastic_round_bf16: rows must be int32 or uint32 [{values.shape[0]}], got "
            f"{rows.dtype} {list(rows.shape)}"
        )
    kernels = {"xla": stochastic_round_bf16_xla, "native": stochastic_round_bf16_native}
    scalars = jnp.asarray(seed, jnp.uint32), jnp.asarray(step, jnp.int32)
    rounded: jax.Array = run_on_platform(
        "stochastic_round_bf16", implementation, kernels, values, rows, *scalars
    )
    return rounded
