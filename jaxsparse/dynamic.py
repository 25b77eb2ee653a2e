# SPDX-License-Identifier: Apache-2.0
"""What a table of unbounded vocabulary declares: `Dynamic` keys, who gets a row, who loses it.

Pure descriptions; `jaxsparse.store` does what they say.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

DefaultRow = Literal["trained", "fixed"]
"""What keys without a row of their own read: one shared row that learns, or stays as drawn."""

MAX_CAPACITY = 2**31 - 2
"""Most keys of a table: row numbers are int32."""

MAX_BLOOM_COUNT = 255
"""Largest count a Bloom filter can tell: its counters have a byte."""


def check_int(owner: str, field: str, value: object, low: int, high: int | None = None) -> None:
    """Raises ValueError where a field is no int of ``low..high``."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):  # type: ignore[operator]
        text = f"an int >= {low}" if high is None else f"an int in {low}..{high}"
        raise ValueError(f"{owner}: {field} must be {text}, got {value!r}")


def _check_number(owner: str, field: str, value: object, above: float = 0.0) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not above < value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{owner}: {field} must be a finite number > {above:g}, got {value!r}")


def _check_default(owner: str, value: object) -> None:
    if value not in get_args(DefaultRow):
        raise ValueError(
            f"{owner}: default_row must be one of {get_args(DefaultRow)}, got {value!r}"
        )


@dataclasses.dataclass(frozen=True)
class CountAdmission:
    """A key gets its row in the batch in which it has occurred ``min_count`` times.

    All occurrences in that batch read the new row. Keys seen less often are counted exactly, at
    some 20 bytes each.
    """

    min_count: int
    """Occurrences, >= 1."""

    default_row: DefaultRow = "trained"
    """What other keys read: one shared row, ``trained`` with them or ``fixed``."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        check_int("CountAdmission", "min_count", self.min_count, 1)
        _check_default("CountAdmission", self.default_row)


@dataclasses.dataclass(frozen=True)
class ProbabilityAdmission:
    """Every occurrence of a key without a row gives it one with probability ``p``.

    The draw is a hash of key, batch number and ``seed``: it can be repeated.
    """

    p: float
    """In (0, 1]."""

    default_row: DefaultRow = "trained"
    """What other keys read: one shared row, ``trained`` with them or ``fixed``."""

    seed: int = 0
    """Another seed draws other keys, 0..2**64 - 1."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        _check_number("ProbabilityAdmission", "p", self.p)
        if self.p > 1:
            raise ValueError(f"ProbabilityAdmission: p must be in (0, 1], got {self.p!r}")
        check_int("ProbabilityAdmission", "seed", self.seed, 0, 2**64 - 1)
        _check_default("ProbabilityAdmission", self.default_row)


@dataclasses.dataclass(frozen=True)
class BloomAdmission:
    """`CountAdmission` in bounded memory: counts are kept in a counting Bloom filter.

    Counts are never too low; they are too high where a key shares all its counters with others,
    so some keys are admitted early. Source: Fan et al. 2000 (counting), Estan, Varghese 2002
    (conservative update).
    """

    min_count: int
    """Occurrences, 1..255."""

    bytes: int
    """Memory of the filter, one counter a byte, >= 64. Ten bytes a key that is ever seen keep
    about 1 % of them from being counted exactly."""

    default_row: DefaultRow = "trained"
    """What other keys read: one shared row, ``trained`` with them or ``fixed``."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        check_int("BloomAdmission", "min_count", self.min_count, 1, MAX_BLOOM_COUNT)
        check_int("BloomAdmission", "bytes", self.bytes, 64)
        _check_default("BloomAdmission", self.default_row)


@dataclasses.dataclass(frozen=True)
class LRU:
    """A full table gives up the rows that have not occurred for longest."""


@dataclasses.dataclass(frozen=True)
class LFU:
    """A full table gives up the rows that have occurred least since they were made.

    Of equally frequent ones the row goes that has not occurred for longest.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTL:
    """A row expires when its key has not occurred for some time; then it is as new.

    A table that is full before anything has expired gives up rows as `LRU`.
    """

    steps: int | None = None
    """Training batches without the key after which its row has expired."""

    seconds: float | None = None
    """The same in the time of the data, which ``RowStore.passes(time=)`` tells; give one of the
    two."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        if (self.steps is None) == (self.seconds is None):
            raise ValueError(
                f"TTL: give steps or seconds, got steps={self.steps}, seconds={self.seconds}"
            )
        if self.steps is not None:
            check_int("TTL", "steps", self.steps, 1)
        else:
            _check_number("TTL", "seconds", self.seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class L2Norm:
    """A nearly full table gives up the rows whose Euclidean norm is small.

    They are looked for between passes, when the table is nine tenths full; rows of the pass to
    come, and those that leave the devices for it, stay. A table that is full before any row is so
    small gives up rows as `LRU`.
    """

    below: float
    """Norm below which a row may go, > 0."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        _check_number("L2Norm", "below", self.below)


Admission = CountAdmission | ProbabilityAdmission | BloomAdmission
Eviction = LRU | LFU | TTL | L2Norm


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """Any 64-bit key or string; a key gets a row when it is first trained on.

    Needs a `jaxsparse.RowStore`. Integers are keys by their 64 bits, none is reserved; strings by
    their 64-bit fingerprint. A new row depends on the collection's key, the table's name and the
    key alone, wherever and whenever it is made.

    >>> Dynamic(1_000_000, admission=CountAdmission(2), eviction=LRU()).capacity
    1000000
    """

    capacity: int
    """Most keys with a row, over all tiers."""

    admission: Admission | None = None
    """Which keys get a row; None gives one to each."""

    eviction: Eviction | None = None
    """Which rows go when the table is full; None refuses the batch."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        check_int("Dynamic", "capacity", self.capacity, 1, MAX_CAPACITY)
        for field, kinds in (("admission", Admission), ("eviction", Eviction)):
            value = getattr(self, field)
            if value is not None and not isinstance(value, kinds):
                names = ", ".join(f"js.{kind.__name__}(...)" for kind in get_args(kinds))
                raise TypeError(f"Dynamic: {field} must be None or one of {names}, got {value!r}")

    def check(self, vocabulary_size: int | None) -> None:
        """Raises ValueError unless ``vocabulary_size`` is None: there is no such number."""
        if vocabulary_size is not None:
            raise ValueError(
                "vocabulary_size must be None with Dynamic keys, whose capacity is the most rows, "
                f"got {vocabulary_size!r}"
            )
