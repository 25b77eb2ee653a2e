# SPDX-License-Identifier: Apache-2.0
"""Shapes and values to try the rounding with."""

from __future__ import annotations

import numpy as np

SHAPES = {"none": (0, 4), "one": (1, 1), "odd": (130, 7), "row": (65, 64), "wide": (3, 1024)}
"""Rows and columns by name."""

# fmt: off
SPECIAL_BITS = (
    0x00000000, 0x00000001, 0x00007FFF, 0x0000FFFF, 0x00010000, 0x007FFFFF, 0x00800000,
    0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3F80FFFF, 0x7F7F0000, 0x7F7F0001, 0x7F7FFFFF,
    0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF,
)
# fmt: on
"""float32 where rounding may go wrong: zero, subnormals, the edges of a binade, the largest finite
values, infinity, and NaNs whose mark lies in the bits that are cut off."""


def values_of_every_size(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """float32 of both signs and every exponent, the special ones among them."""
    bits = rng.integers(0, 2**32, shape, dtype=np.uint32)
    special = np.array(SPECIAL_BITS, np.uint32)
    flat = bits.reshape(-1)
    both = np.concatenate([special, special | np.uint32(0x80000000)])[: flat.size // 2]
    flat[: both.size] = both
    return bits.view(np.float32)
