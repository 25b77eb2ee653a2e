# SPDX-License-Identifier: Apache-2.0
"""Columns and batches one after another, where their parts come from several places."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxsparse.data.batch import Batch, Labels
from jaxsparse.data.columns import Array, Column
from jaxsparse.data.schema import DataError
from jaxsparse.key_arrays import concatenate_keys
from jaxsparse.ragged import Ragged


def join_batches(parts: Sequence[Batch], origins: Sequence[str] = ()) -> Batch:
    """All samples of ``parts``, which have the same columns; ``origins`` are as `join_columns`.

    Raises:
        DataError: keys of one feature that no dtype holds, such as -1 and 2**64 - 1.
    """
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    labels: Labels
    if isinstance(first.labels, dict):
        labels = {name: np.concatenate([p.labels[name] for p in parts]) for name in first.labels}
    else:
        labels = np.concatenate([part.labels for part in parts])
    dense = [part.dense for part in parts if part.dense is not None]
    weights = [part.weights for part in parts if part.weights is not None]
    return Batch(
        {
            name: join_columns(name, [part.features[name] for part in parts], origins)
            for name in first.features
        },
        np.concatenate(dense) if dense else None,
        labels,
        np.concatenate(weights) if weights else None,
    )


def join_columns(name: str, parts: list[Column], origins: Sequence[str] = ()) -> Column:
    """One column of the columns of several files.

    Args:
        name: of the column.
        parts: the column in each file.
        origins: where each part comes from, for messages; none are "part 0" and so on.

    Raises:
        DataError: the files differ in the kind of their keys.
    """
    try:
        if any(isinstance(part, Ragged) for part in parts):
            bags = [part for part in parts if isinstance(part, Ragged)]
            if len(bags) < len(parts):
                raise TypeError("some files hold lists and others single keys")
            return Ragged.concatenate([Ragged.from_lengths(*same) for same in _widened(bags)])
        arrays = [part for part in parts if not isinstance(part, Ragged)]
        return concatenate_keys(_common(arrays))
    except TypeError as error:
        there: dict[str, str] = {}
        for number, part in enumerate(parts):
            there.setdefault(_kind(part), origins[number] if origins else f"part {number}")
        kinds = ", ".join(f"{kind} in {where}" for kind, where in there.items() if kind)
        raise DataError(f"column {name!r} differs between the files: {error} ({kinds})") from error


def _kind(part: Column) -> str:
    """What a part holds, with an example where it is integers; "" if it is empty."""
    keys = part.values if isinstance(part, Ragged) else part
    shape = "lists of " if isinstance(part, Ragged) else ""
    if not keys.size:
        return ""
    if keys.dtype.kind not in "iu":
        return f"{shape}strings"
    low, high = int(keys.min()), int(keys.max())
    if low < 0 or high >= 2**63:
        return f"{shape}integers such as {low if low < 0 else high}"
    return f"{shape}integers"


def _widened(bags: list[Ragged]) -> list[tuple[Array, Array]]:
    values = _common([bag.values for bag in bags])
    return [(value, bag.lengths) for value, bag in zip(values, bags, strict=True)]


def _common(arrays: list[Array]) -> list[Array]:
    """Signed keys beside unsigned ones become unsigned where none is negative."""
    if {array.dtype.kind for array in arrays} != {"i", "u"}:
        return arrays
    if any(array.size and array.min() < 0 for array in arrays):
        return arrays
    return [array.astype(np.uint64) for array in arrays]
