# SPDX-License-Identifier: Apache-2.0
"""Arrays of keys from Python sequences and from each other, without numpy's lossy casts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def unmasked(what: str, data: Any) -> Any:
    """``data``, unless it is a masked array with a masked entry: numpy would use what lies below.

    Raises:
        ValueError: it is; the message begins with ``what`` and has the position.
    """
    if isinstance(data, np.ma.MaskedArray) and np.ma.is_masked(data):
        at = tuple(int(i) for i in np.argwhere(np.ma.getmaskarray(data))[0])
        position = at[0] if len(at) == 1 else at
        raise ValueError(
            f"{what} must have no masked entries, got one at position {position}; "
            "fill or drop them first"
        )
    return data


def key_array(data: Any) -> Array:
    """Arrays as they are; Python lists exactly (numpy alone makes ``[1, 2**63]`` float64).

    Integers become int64, or uint64 if that is what holds them; everything else an object array.

    Raises:
        ValueError: an entry is masked.
    """
    unmasked("keys", data)
    if hasattr(data, "__array__"):
        return np.asarray(data)
    items = list(data)
    if not items:
        return np.zeros(0, np.int64)
    kinds = set(map(type, items))
    if all(issubclass(k, int | np.integer) and not issubclass(k, bool) for k in kinds):
        low, high = int(min(items)), int(max(items))
        if low >= -(2**63) and high < 2**63:
            return np.fromiter(items, np.int64, len(items))
        if low >= 0 and high < 2**64:
            return np.fromiter(items, np.uint64, len(items))
    return np.fromiter(items, object, len(items))


def chain_keys(lists: Sequence[Any]) -> Array | list[Any]:
    """One after another: arrays of one dtype keep it, everything else goes through a list.

    Raises:
        ValueError: an entry of an array is masked.
    """
    for bag, items in enumerate(lists):
        if isinstance(items, np.ma.MaskedArray):
            unmasked(f"bag {bag}", items)
    dtypes = {items.dtype if isinstance(items, np.ndarray) else None for items in lists}
    if len(dtypes) == 1 and None not in dtypes:
        return np.concatenate(lists)
    return list(itertools.chain.from_iterable(lists))


def concatenate_keys(arrays: Sequence[Array]) -> Array:
    """Concatenates arrays ``[N_i]``; empty ones have no say in the dtype.

    Raises:
        TypeError: integers beside strings, or integers whose common dtype would be a float.
    """
    filled = [array for array in arrays if array.size] or list(arrays[:1])
    if not filled:
        return np.zeros(0, np.int64)
    kinds = {array.dtype.kind for array in filled}
    if len(kinds) > 1 and kinds <= set("USTO"):
        # bytes beside str: a fixed-width common dtype would decode them.
        return np.concatenate([array.astype(object) for array in filled])
    if kinds in ({"i"}, {"u"}, {"i", "u"}) or len(kinds) == 1:
        dtype = np.result_type(*filled)
        if not (dtype.kind == "f" and kinds <= set("iu")):
            return np.concatenate(filled)
    names = sorted({str(array.dtype) for array in filled})
    raise TypeError(f"keys of {' and '.join(names)} have no exact common dtype; cast them first")
