# SPDX-License-Identifier: Apache-2.0
"""Rounding at random on any XLA backend: the same bits as `stochastic.h` makes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_GOLDEN = 0x9E3779B9
_QUIET = 0x40


def mix32(x: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3 (Appleby) on uint32."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def step_key(seed: jax.Array, step: jax.Array) -> jax.Array:
    """uint32 scalar that the rows' noise of one update is made from."""
    return mix32(mix32(seed + jnp.uint32(_GOLDEN)) ^ step.astype(jnp.uint32))


def stochastic_bits(values: jax.Array, row_keys: jax.Array, columns: jax.Array) -> jax.Array:
    """bfloat16 bits of ``values``, for kernels that hold a block of them.

    Args:
        values: float32.
        row_keys: uint32, ``mix32(step_key ^ row)``, broadcastable.
        columns: uint32, broadcastable.

    Returns:
        uint32 in ``[0, 2^16)``.
    """
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    noise = mix32(row_keys + columns * jnp.uint32(_GOLDEN)) >> 16
    # A carry out of the lower half is the step up in magnitude. Nothing carries out of infinity.
    rounded = (bits + noise) >> 16
    not_a_number = (bits & jnp.uint32(0x7FFFFFFF)) > jnp.uint32(0x7F800000)
    return jnp.where(not_a_number, (bits >> 16) | jnp.uint32(_QUIET), rounded)


def stochastic_round_bf16_xla(
    values: jax.Array, rows: jax.Array, seed: jax.Array, step: jax.Array
) -> jax.Array:
    """`stochastic_round_bf16` of arrays whose dtypes are right."""
    row_keys = mix32(step_key(seed, step) ^ rows.astype(jnp.uint32))
    columns = lax.iota(jnp.uint32, values.shape[1])
    bits = stochastic_bits(values, row_keys[:, None], columns[None, :])
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def quantize_int8(values: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes each row in 8 bits: 255 equal steps from its least to its largest value.

    Half a step is the largest error, beside float32's. A row that holds NaN or infinity comes back
    as NaN throughout.

    Args:
        values: ``[K, D]`` float32, D at least 1.

    Returns:
        Codes ``[K, D]`` int8, and scales and offsets, both ``[K]`` float32.

    >>> codes, scales, offsets = quantize_int8(jnp.array([[-1.0, 50.0, 254.0]]))
    >>> codes.tolist(), offsets.tolist()
    ([[-128, -77, 127]], [-1.0])
    """
    finite = jnp.isfinite(values).all(axis=1)
    low, high = values.min(axis=1), values.max(axis=1)
    # Halves, which are exact: the difference of the whole ones may overflow.
    half_steps = (high / 2 - low / 2) / 255
    scales = jnp.where(finite, half_steps * 2, jnp.nan)
    offsets = jnp.where(finite, low, jnp.nan)
    places = (values / 2 - low[:, None] / 2) / jnp.where(half_steps > 0, half_steps, 1.0)[:, None]
    codes = jnp.clip(jnp.round(places), 0, 255) - 128
    return jnp.where(finite[:, None], codes, 0).astype(jnp.int8), scales, offsets


def dequantize_int8(codes: jax.Array, scales: jax.Array, offsets: jax.Array) -> jax.Array:
    """Values ``[K, D]`` float32 of `quantize_int8`: ``(code + 128) * scale + offset``.

    >>> dequantize_int8(*quantize_int8(jnp.array([[5.0, 5.0]]))).tolist()
    [[5.0, 5.0]]
    """
    steps = codes.astype(jnp.float32) + 128
    return steps * scales[:, None] + offsets[:, None]
