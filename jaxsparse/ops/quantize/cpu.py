# SPDX-License-Identifier: Apache-2.0
"""Rounding at random on the CPU, in C++."""

from __future__ import annotations

import jax
import jax.numpy as jnp

HANDLERS = ("jaxsparse_stochastic_round",)


def stochastic_round_bf16_native(
    values: jax.Array, rows: jax.Array, seed: jax.Array, step: jax.Array
) -> jax.Array:
    """`stochastic_round_bf16` of arrays whose dtypes are right; the library is loaded."""
    shape = jax.ShapeDtypeStruct(values.shape, jnp.bfloat16)
    call = jax.ffi.ffi_call(HANDLERS[0], shape, vmap_method="sequential")
    rounded: jax.Array = call(values, rows.astype(jnp.int32), seed, step)
    return rounded
