# SPDX-License-Identifier: Apache-2.0
"""What a key index takes: keys, rows and snapshots, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
UInt64s = npt.NDArray[np.uint64]

MAX_CAPACITY = 2**31 - 2
"""Row numbers and the number of rows are int32."""


def checked_keys(keys: npt.ArrayLike) -> UInt64s:
    """Keys as contiguous uint64; the errors are those of `KeyIndex.find`."""
    array = np.asarray(keys)
    if array.dtype not in (np.int64, np.uint64):
        raise TypeError(
            f"keys must be int64 or uint64, got {array.dtype}; convert them, exactly, before"
        )
    _check_vector("keys", array)
    return np.ascontiguousarray(array).view(np.uint64)


def checked_rows(rows: npt.ArrayLike) -> Int32s:
    """Rows as contiguous int32; the errors are those of `KeyIndex.remove`."""
    array = np.asarray(rows)
    if array.dtype.kind not in "iu":
        raise TypeError(f"rows must be integers, got {array.dtype}")
    _check_vector("rows", array)
    if array.dtype != np.int32:
        # What int32 does not hold is no row of any index; -1 is not live either.
        held = (array >= 0) & (array <= MAX_CAPACITY)
        array = np.where(held, array.astype(np.int32), np.int32(-1))
    return np.ascontiguousarray(array)


def _check_vector(what: str, array: npt.NDArray[Any]) -> None:
    if array.ndim != 1:
        raise ValueError(f"{what} must be a vector, got shape {array.shape}; use ravel()")


def checked_snapshot(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[UInt64s, Int32s]:
    """Keys and freed rows of a snapshot; the errors are those of `KeyIndex.from_arrays`."""
    if set(arrays) != {"keys", "free"}:
        raise ValueError(
            f"the snapshot of a key index has arrays 'free' and 'keys', got {sorted(arrays)}"
        )
    keys, free = (np.ascontiguousarray(arrays[name]) for name in ("keys", "free"))
    for name, array, dtype in (("keys", keys, np.uint64), ("free", free, np.int32)):
        if array.ndim != 1 or array.dtype != dtype:
            raise ValueError(
                f"{name!r} in the snapshot of a key index must be a vector of {np.dtype(dtype)}, "
                f"got {array.dtype} of shape {array.shape}"
            )
    is_free = np.zeros(keys.size, np.bool_)
    inside = free[(free >= 0) & (free < keys.size)]
    is_free[inside] = True
    if int(is_free.sum()) != free.size:
        raise ValueError(
            f"'free' in the snapshot of a key index must hold different rows of the {keys.size} "
            f"in 'keys', got {free.size} entries of which {int(is_free.sum())} are; it is damaged"
        )
    return keys, free
