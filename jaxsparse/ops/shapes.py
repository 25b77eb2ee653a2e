# SPDX-License-Identifier: Apache-2.0
"""What kernels are given fits together: they read and write memory by the sizes they were told."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


class Shapes:
    """Sizes that the arrays of one call share, by letter.

    Dimensions are written as in docstrings: ``"K, D"``, ``"O + 1"``; a scalar has ``""``, and
    ``_`` may be anything. The first array with a letter settles it.

    >>> shapes = Shapes("embedding_bag")
    >>> shapes.check("offsets", jnp.zeros(5, jnp.int32), "O + 1", jnp.int32)
    >>> shapes.check("scale", jnp.ones(3), "O", jnp.float32)
    Traceback (most recent call last):
    ValueError: embedding_bag: scale must be float32 [O = 4], got float32 [3]
    """

    def __init__(self, op: str) -> None:
        """Takes the operation's name, for messages."""
        self._op = op
        self.sizes: dict[str, int] = {}

    def check(self, name: str, array: Any, dims: str, *dtypes: Any) -> None:
        """Raises ValueError unless an array, or what stands for one, has these dimensions.

        Args:
            name: of the argument.
            array: with ``shape`` and ``dtype``; None is one left out, which fits.
            dims: its dimensions.
            dtypes: those it may have.
        """
        if array is None:
            return
        letters = dims.split(", ") if dims else []
        fits = array.dtype in map(jnp.dtype, dtypes) and len(array.shape) == len(letters)
        if not fits or not all(map(self._fits, letters, array.shape)):
            kinds = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
            wanted = ", ".join(map(self._told, letters))
            raise ValueError(
                f"{self._op}: {name} must be {kinds} [{wanted}], got "
                f"{array.dtype} {list(array.shape)}"
            )

    def _fits(self, letter: str, size: int) -> bool:
        letter, _, more = letter.partition(" + ")
        size -= int(more or 0)
        return letter == "_" or (size >= 0 and self.sizes.setdefault(letter, size) == size)

    def _told(self, letter: str) -> str:
        size = self.sizes.get(letter.partition(" + ")[0])
        return letter if size is None else f"{letter} = {size + int('+' in letter)}"
