# SPDX-License-Identifier: Apache-2.0
"""Two expressions whose obvious float32 form is wrong."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def ratio_or_zero(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """``numerator / denominator``, and 0 where the denominator is 0: such an entry does not move.

    Args:
        numerator: float32, broadcastable against ``denominator``.
        denominator: float32.

    Returns:
        float32 of the broadcast shape; NaN and inf of the operands pass through.

    >>> ratio_or_zero(jnp.float32([0, 1, 3]), jnp.float32([0, 0, 2])).tolist()
    [0.0, 0.0, 1.5]
    """
    is_zero = denominator == 0
    return jnp.where(is_zero, 0.0, numerator / jnp.where(is_zero, 1.0, denominator))


def one_minus_power(base: float, exponent: jax.Array) -> jax.Array:
    """``1 - base**exponent`` to float32 rounding, for a constant base in [0, 1).

    ``1 - .999`` in float32 is off by 1e-5, which would be Adam's error in its first steps.

    Args:
        base: Python float, so that its logarithm is taken in float64.
        exponent: int32 >= 1.

    Returns:
        float32 of the shape of ``exponent``.

    >>> float(one_minus_power(0.5, jnp.int32(2)))
    0.75
    """
    count = exponent.astype(jnp.float32)
    if base == 0.0:
        return jnp.ones_like(count)
    return -jnp.expm1(count * math.log(base))
