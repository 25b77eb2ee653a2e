# SPDX-License-Identifier: Apache-2.0
"""From keys to rows: a key's own number, or its hash; pure numpy, no state."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import xxhash

from jaxsparse.collisions import CollisionStatistics, check_counts, count_collisions
from jaxsparse.fingerprint import (
    HASH_VERSION,
    MASK64,
    ExactIndex,
    Flat,
    Int64s,
    Keys,
    Uint64s,
    example,
    fingerprint64,
    fingerprint_flat,
    mix64,
    parse_keys,
    utf8,
)

__all__ = [
    "HASH_VERSION",
    "CollisionStatistics",
    "Hashed",
    "Identity",
    "collision_statistics",
    "fingerprint64",
]

OutOfRange = Literal["error", "ignore"]


def _check_vocabulary_size(vocabulary_size: int) -> None:
    if not 0 < vocabulary_size < 2**63:
        raise ValueError(f"vocabulary_size must be in 1..2**63 - 1, got {vocabulary_size}")


@dataclasses.dataclass(frozen=True)
class Identity:
    """A key is its row: integers 0..vocabulary_size - 1.

    >>> Identity().rows(np.array([3, 0]), 10)
    array([3, 0])
    """

    out_of_range: OutOfRange = "error"
    """``error`` refuses other keys; ``ignore`` gives them row -1, which looks nothing up."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        if self.out_of_range not in get_args(OutOfRange):
            raise ValueError(
                f"Identity: out_of_range must be one of {get_args(OutOfRange)}, "
                f"got {self.out_of_range!r}"
            )

    def check(self, vocabulary_size: int) -> None:
        """Raises ValueError unless a table of ``vocabulary_size`` rows can be addressed so."""
        _check_vocabulary_size(vocabulary_size)

    def rows(self, keys: Keys, vocabulary_size: int) -> Int64s:
        """Rows of ``keys``.

        Args:
            keys: integers of any dtype and shape.
            vocabulary_size: rows of the table, up to 2**63 - 1.

        Returns:
            int64 in the shape of ``keys``, in [0, vocabulary_size); -1 for ignored keys.

        Raises:
            TypeError: ``keys`` are no integers; the message quotes one.
            ValueError: a key is out of range and ``out_of_range="error"``; the message has the
                first such key and its position.
        """
        self.check(vocabulary_size)
        array, flat = parse_keys(keys)
        if not isinstance(flat, np.ndarray):
            raise TypeError(
                f"Identity() takes integers, got the string {example(array, 0)}; "
                f"use Hashed() for strings"
            )
        # Negative keys are above 2**63 in this view: one comparison finds both ends.
        outside = flat >= np.uint64(vocabulary_size)
        if outside.any():
            if self.out_of_range == "error":
                first = example(array, int(outside.argmax()))
                raise ValueError(f"key {first} is outside 0..{vocabulary_size - 1}")
            flat = np.where(outside, np.uint64(MASK64), flat)
        return flat.view(np.int64).reshape(array.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Hashed:
    """Any 64-bit integer or string; a key's row is its hash, or its own if it is an exact key.

    Exact keys are those of a counted vocabulary: they get rows 0..E - 1 in the given order and
    collide with nobody. All other keys share rows E..vocabulary_size - 1 by hash. Strings are told
    apart by their 64-bit fingerprints; a numpy array of fixed width has dropped their trailing NULs
    (`fingerprint64`), so where keys end with NULs use lists or arrays of dtype object.

    >>> Hashed(exact_keys=["shoe", "hat"]).rows(["hat", "shoe", "never seen"], 1000)
    array([  1,   0, 524])
    """

    exact_keys: Any = None
    """Distinct integers, or distinct strings, with rows of their own; None for none."""

    seed: int = 0
    """Another seed spreads the hashed keys in another way, 0..2**64 - 1."""

    def __post_init__(self) -> None:
        """Validates the fields and copies the exact keys into a read-only array."""
        is_int = isinstance(self.seed, int | np.integer) and not isinstance(self.seed, bool)
        if not is_int or not 0 <= self.seed <= MASK64:
            raise ValueError(f"Hashed: seed must be an int in 0..2**64 - 1, got {self.seed!r}")
        object.__setattr__(self, "seed", int(self.seed))
        if self.exact_keys is None:
            return
        array, flat = parse_keys(self.exact_keys)
        if array.ndim != 1 or not array.size:
            raise ValueError(
                f"Hashed: exact_keys must be a non-empty list of keys, got shape {array.shape}"
            )
        _check_distinct(array, fingerprint_flat(flat))
        if isinstance(flat, np.ndarray):
            stored: npt.NDArray[Any] = flat
        else:
            stored = np.empty(len(flat), object)
            stored[:] = [utf8(s) for s in flat]
        stored.flags.writeable = False
        object.__setattr__(self, "exact_keys", stored)

    @property
    def num_exact_keys(self) -> int:
        """How many keys have a row of their own."""
        return 0 if self.exact_keys is None else len(self.exact_keys)

    @functools.cached_property
    def digest(self) -> int:
        """128 bits that name this addressing: version, seed and the exact keys in order."""
        state = xxhash.xxh3_128(f"{HASH_VERSION} {self.seed} {self.num_exact_keys}".encode())
        if self.exact_keys is not None and self.exact_keys.dtype == np.uint64:
            state.update(b" integers " + self.exact_keys.astype("<u8").tobytes())
        elif self.exact_keys is not None:
            for key in self.exact_keys:
                state.update(b" string %d " % len(key) + key)
        return state.intdigest()

    def __eq__(self, other: object) -> bool:
        """Whether ``other`` gives every key the same row."""
        return isinstance(other, Hashed) and self.digest == other.digest

    def __hash__(self) -> int:
        """From the cached digest: specs with 10^6 exact keys stay cheap as static arguments."""
        return hash(self.digest)

    def __repr__(self) -> str:
        """Counts the exact keys instead of listing them."""
        return f"Hashed(exact_keys=<{self.num_exact_keys} keys>, seed={self.seed})"

    @functools.cached_property
    def index(self) -> ExactIndex:
        """Finds the exact keys; there have to be some."""
        kept = self.exact_keys
        return ExactIndex(fingerprint_flat(kept if kept.dtype == np.uint64 else list(kept)))

    def check(self, vocabulary_size: int) -> None:
        """Raises ValueError unless a table of ``vocabulary_size`` rows can be addressed so."""
        _check_vocabulary_size(vocabulary_size)
        if vocabulary_size <= self.num_exact_keys:
            raise ValueError(
                f"Hashed: {self.num_exact_keys} exact_keys need a vocabulary_size of at least "
                f"{self.num_exact_keys + 1} (one row for all other keys), got {vocabulary_size}"
            )

    def rows(self, keys: Keys, vocabulary_size: int) -> Int64s:
        """Rows of ``keys``.

        Args:
            keys: integers or strings of any dtype and shape (see `fingerprint64`).
            vocabulary_size: rows of the table, exact keys included, up to 2**63 - 1.

        Returns:
            int64 in the shape of ``keys``, in [0, vocabulary_size).

        Raises:
            TypeError: ``keys`` are neither, or strings where the exact keys are integers (or the
                other way round: they could never match).
            ValueError: the exact keys leave no row for others.
        """
        self.check(vocabulary_size)
        array, flat = parse_keys(keys)
        fingerprints = fingerprint_flat(flat)
        num_exact = self.num_exact_keys
        rows = self._hashed_rows(fingerprints, vocabulary_size - num_exact)
        if num_exact and array.size:
            self._check_kind(array, flat)
            rows += num_exact
            exact = self.index.find(fingerprints)
            rows = np.where(exact >= 0, exact, rows)
        return rows.reshape(array.shape)

    def _hashed_rows(self, fingerprints: Uint64s, num_rows: int) -> Int64s:
        """Fingerprint modulo ``num_rows``; the remainder's bias is below num_rows / 2**64."""
        if self.seed:
            fingerprints = mix64(fingerprints ^ mix64(np.array([self.seed], np.uint64)))
        divisor = np.uint64(num_rows)
        # numpy divides by a scalar with multiplications but has no such path for `%`.
        rounded_down = fingerprints // divisor
        rounded_down *= divisor
        np.subtract(fingerprints, rounded_down, out=rounded_down)
        return rounded_down.view(np.int64)

    def _check_kind(self, array: npt.NDArray[Any], flat: Flat) -> None:
        integers = self.exact_keys.dtype == np.uint64
        if integers != isinstance(flat, np.ndarray):
            want, got = ("integers", "string") if integers else ("strings", "integer")
            raise TypeError(f"exact_keys are {want}, got the {got} {example(array, 0)}")


def _check_distinct(array: npt.NDArray[Any], fingerprints: Uint64s) -> None:
    _, first = np.unique(fingerprints, return_index=True)
    if len(first) < len(fingerprints):
        again = np.setdiff1d(np.arange(len(fingerprints)), first)[0]
        raise ValueError(
            f"Hashed: exact_keys must be distinct, but {example(array, int(again))} is a repetition"
        )


def collision_statistics(
    keys: Keys,
    vocabulary_size: int,
    counts: npt.ArrayLike | None = None,
    *,
    hashed: Hashed | None = None,
) -> CollisionStatistics:
    """Counts collisions by decile of frequency; ties in frequency are ordered by fingerprint.

    Args:
        keys: integers or strings; may repeat.
        vocabulary_size: rows of the table.
        counts: occurrences of each of ``keys``, non-negative integers in its shape; None counts
            every entry once.
        hashed: the table's addressing; None is ``Hashed()``.

    Returns:
        The statistics; they do not depend on the order of ``keys``.

    Raises:
        ValueError: ``counts`` has another shape or a negative entry.
        TypeError: ``counts`` are no integers, or as `Hashed.rows`.

    >>> int(collision_statistics([1, 1, 2, 3], vocabulary_size=1).colliding_keys.sum())
    3
    """
    fingerprints = fingerprint64(keys)
    weights = check_counts(counts, fingerprints.shape)
    rows = (Hashed() if hashed is None else hashed).rows(keys, vocabulary_size)
    return count_collisions(fingerprints, rows, weights)
