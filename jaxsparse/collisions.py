# SPDX-License-Identifier: Apache-2.0
"""How often hashed keys share a row, by decile of their frequency."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.fingerprint import Int64s, Uint64s

NUM_DECILES = 10


@dataclasses.dataclass(frozen=True)
class CollisionStatistics:
    """How the keys of a table share rows, by frequency: decile 0 holds the most frequent tenth.

    A key collides when another key has the same row.
    """

    num_keys: int
    """Distinct keys."""

    num_rows_used: int
    """Distinct rows among them."""

    keys: Int64s
    """Distinct keys per decile, [10]."""

    occurrences: Int64s
    """Occurrences of those keys, [10]."""

    colliding_keys: Int64s
    """How many of those keys collide (with a key of any decile), [10]."""

    colliding_occurrences: Int64s
    """Occurrences of the colliding keys, [10]."""

    @property
    def collision_rate(self) -> float:
        """Share of the distinct keys that collide; 0 without keys."""
        return float(self.colliding_keys.sum()) / max(self.num_keys, 1)

    def __str__(self) -> str:
        """A table with one line per decile."""
        columns = (self.keys, self.occurrences, self.colliding_keys, self.colliding_occurrences)
        lines = ["decile        keys  occurrences  colliding keys  colliding occurrences"]
        for decile, (keys, seen, bad, bad_seen) in enumerate(zip(*columns, strict=True)):
            lines.append(f"{decile:6d}{keys:12d}{seen:13d}{bad:16d}{bad_seen:23d}")
        return "\n".join(lines)


def count_collisions(fingerprints: Uint64s, rows: Int64s, counts: Int64s) -> CollisionStatistics:
    """Statistics of keys given by fingerprint, row and occurrences: three arrays of one shape."""
    _, first, inverse = np.unique(fingerprints, return_index=True, return_inverse=True)
    seen = np.zeros(len(first), np.int64)
    np.add.at(seen, inverse.reshape(-1), counts.reshape(-1))
    _, row_of, keys_in_row = np.unique(
        rows.reshape(-1)[first], return_inverse=True, return_counts=True
    )
    collides = keys_in_row[row_of] > 1
    decile = np.empty(len(first), np.int64)
    decile[np.argsort(-seen, kind="stable")] = (
        np.arange(len(first)) * NUM_DECILES // max(len(first), 1)
    )

    def per_decile(values: npt.NDArray[Any]) -> Int64s:
        total = np.zeros(NUM_DECILES, np.int64)
        np.add.at(total, decile, values)
        return total

    return CollisionStatistics(
        num_keys=len(first),
        num_rows_used=len(keys_in_row),
        keys=per_decile(np.ones_like(seen)),
        occurrences=per_decile(seen),
        colliding_keys=per_decile(collides),
        colliding_occurrences=per_decile(seen * collides),
    )


def check_counts(counts: npt.ArrayLike | None, shape: tuple[int, ...]) -> Int64s:
    """``counts`` as int64 of ``shape``; ones for None; refuses anything else."""
    if counts is None:
        return np.ones(shape, np.int64)
    array = np.asarray(counts)
    if array.shape != shape:
        raise ValueError(f"counts must have the shape of keys {shape}, got {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"counts must be integers, got {array.dtype}")
    if (array < 0).any():
        raise ValueError(f"counts must not be negative, got {array.min()}")
    return array.astype(np.int64)
