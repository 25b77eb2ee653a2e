# SPDX-License-Identifier: Apache-2.0
"""Optional arguments of a handler: an empty array stands in, and bits say which are there."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def or_empty(array: jax.Array | None, dtype: Any) -> Any:
    """The array, or one of no elements."""
    return np.zeros((0,), dtype) if array is None else array


def presence(*arrays: jax.Array | None) -> int:
    """Bit n is set where array n is there.

    >>> presence(None, np.zeros(1), np.zeros(1))
    6
    """
    return sum(1 << index for index, array in enumerate(arrays) if array is not None)
