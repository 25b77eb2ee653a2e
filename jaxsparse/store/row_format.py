# SPDX-License-Identifier: Apache-2.0
"""A row of a slab off the devices: weights and slots as 32-bit words, one after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxsparse.layout import SlabLayout
from jaxsparse.optimizers import Slots
from jaxsparse.store.row_copy import copy_rows

Words = npt.NDArray[np.uint32]


@dataclasses.dataclass(frozen=True)
class Column:
    """One array of a slab within a row."""

    name: str
    """Of the slot; empty for the weights."""
    start: int
    """First word."""
    width: int
    """Words."""
    is_scalar: bool
    """Whether the array is ``[R]``, not ``[R, D]``."""
    dtype: np.dtype[np.generic]
    """float32 or int32."""


@lru_cache(maxsize=256)
def columns(slab: SlabLayout) -> tuple[Column, ...]:
    """Weights first, then slots by name."""
    dim = slab.dim
    found = [Column("", 0, dim, False, np.dtype(np.float32))]
    slots = {}
    if slab.trainable:
        slots = jax.eval_shape(lambda: slab.optimizer.init_slots(1, dim))
    for name in sorted(slots):
        start, is_scalar = found[-1].start + found[-1].width, slots[name].ndim == 1
        width = 1 if is_scalar else dim
        found.append(Column(name, start, width, is_scalar, np.dtype(slots[name].dtype)))
    return tuple(found)


def num_words(slab: SlabLayout) -> int:
    """Words of a row."""
    last = columns(slab)[-1]
    return last.start + last.width


def to_words(
    slab: SlabLayout, parts: Mapping[str, npt.NDArray[Any]], places: npt.NDArray[np.int64]
) -> Words:
    """Rows ``[n, W]`` of weights (named "") ``[K, D]`` and slots; bits stay as they are.

    On the host: XLA CPU takes longer to put arrays side by side than to find their rows.

    Args:
        slab: of the rows.
        parts: arrays by name.
        places: ``[n]``: which of the K.
    """
    words = np.empty((places.size, num_words(slab)), np.uint32)
    for column in columns(slab):
        bits = parts[column.name].view(np.uint32).reshape(-1, column.width)
        copy_rows(words[:, column.start : column.start + column.width], None, bits, places)
    return words


def from_words(slab: SlabLayout, words: jax.Array) -> tuple[jax.Array, Slots]:
    """Weights ``[K, D]`` and slots of rows ``[K, W]``."""
    arrays = {}
    for column in columns(slab):
        part = words[:, column.start : column.start + column.width]
        values = lax.bitcast_convert_type(part, column.dtype)
        arrays[column.name] = values[:, 0] if column.is_scalar else values
    weights = arrays.pop("")
    return weights, arrays


def read_column(slab: SlabLayout, words: Words, name: str) -> npt.NDArray[np.generic]:
    """One array ``[n, D]`` or ``[n]`` of rows ``[n, W]`` on the host."""
    column = next(column for column in columns(slab) if column.name == name)
    part = np.ascontiguousarray(words[:, column.start : column.start + column.width])
    values = part.view(column.dtype)
    return values[:, 0] if column.is_scalar else values


def write_column(
    slab: SlabLayout, words: Words, name: str, values: npt.NDArray[np.generic]
) -> None:
    """Overwrites one array of rows ``[n, W]`` on the host."""
    column = next(column for column in columns(slab) if column.name == name)
    part = np.ascontiguousarray(values, column.dtype).reshape(len(words), column.width)
    words[:, column.start : column.start + column.width] = part.view(np.uint32)
