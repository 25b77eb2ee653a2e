# SPDX-License-Identifier: Apache-2.0
"""Where a row lies in its table: a bijection of ids that no mesh changes.

Everything here is host-side numpy in 64 bits; devices only see (shard, local row).
The order is part of the file format: changing it makes saved tables unreadable.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt

ADDRESSING_VERSION = 1
"""Version of the order below; a change of any constant in this file needs a new one."""

MAX_COLUMN = 1 << 16
"""Largest S, in rows: its permutation fits uint16: 128 KiB, which stay in a core's L2 cache."""

MAX_ROTATION_TABLE = 1 << 20
"""Most rotations kept as a table (4 MiB, up to V = 2^36); beyond, they are computed."""

MAX_CACHED = 1024
"""Most tables of each kind kept, one per S or (Q, S): collections have hundreds of sizes."""

MAX_VOCABULARY = 1 << 48
"""Most rows in a table: rotations mix 32 bits of ``q``, so Q stays within 2^32."""

IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Addressing:
    """The order of a table's rows, as a function of its vocabulary size alone.

    A table is seen as Q columns of S ids each. Every column is laid out by the same
    pseudo-random permutation, rotated by an amount of its own, and the columns are interleaved::

        Q = ceil(V / 65536);  S = ceil(V / Q);  P = S * Q       P - V < Q places hold no row
        q = id // S;          r = id - q * S
        v = (perm_S[r] + rot(q)) mod S                          rot(q) = fmix32(q) * S >> 32
        position = v * Q + q                                    owner = position // ceil(P / N)

    Whole columns are spread exactly (ids 0 .. n-1), and what is left of them, like any stride,
    as by chance. This replaces the affine map ``r * a + rot(q)`` of the first design, whose
    lattice has strides that fall mostly on one owner (991 at V = 10,240,000: 55 % off the mean).
    Here no stride of 2 .. 1,024 at that V is more than 9 % off on 2 .. 8 shards (tested).

    >>> order = Addressing(10)
    >>> positions = order.position(np.arange(10))
    >>> positions
    array([7, 5, 0, 9, 1, 4, 2, 6, 3, 8])
    >>> order.id_at(positions)
    array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """

    vocabulary_size: int
    """Number of rows V, 1 to 2^48."""

    def __post_init__(self) -> None:
        """Validates the vocabulary size."""
        if not 1 <= self.vocabulary_size <= MAX_VOCABULARY:
            raise ValueError(
                f"Addressing: vocabulary_size must be in 1..{MAX_VOCABULARY}, "
                f"got {self.vocabulary_size}"
            )

    @functools.cached_property
    def num_columns(self) -> int:
        """Q, the number of columns."""
        return -(-self.vocabulary_size // MAX_COLUMN)

    @functools.cached_property
    def column_size(self) -> int:
        """S, the number of ids in a column; at most 65,536."""
        return -(-self.vocabulary_size // self.num_columns)

    @property
    def num_positions(self) -> int:
        """P = S * Q, the number of places; P - V < Q of them hold no row."""
        return self.num_columns * self.column_size

    def rows_per_shard(self, num_shards: int) -> int:
        """Places each of ``num_shards`` shards has for this table: ``ceil(P / num_shards)``.

        >>> Addressing(4091).rows_per_shard(8)
        512
        """
        return -(-self.num_positions // num_shards)

    def position(self, ids: npt.ArrayLike) -> IntArray:
        """Positions of rows.

        Args:
            ids: ``[N]`` integers in [0, V).

        Returns:
            ``[N]`` int64, distinct for distinct ids, in [0, P).

        Raises:
            ValueError: an id is outside the table.
        """
        ids = np.ascontiguousarray(ids, dtype=np.int64)
        # One unsigned maximum finds negative ids as well.
        if ids.size and ids.view(np.uint64).max() >= self.vocabulary_size:
            bad = ids[(ids < 0) | (ids >= self.vocabulary_size)]
            raise ValueError(
                f"Addressing: id {bad[0]} is outside 0..{self.vocabulary_size - 1} "
                f"({bad.size} of {ids.size} ids are)"
            )
        if self.num_columns == 1:
            return permutation(self.column_size).take(ids).astype(np.int64)
        column = ids // self.column_size
        rank = ids - column * self.column_size
        place = _rotation(column, self.num_columns, self.column_size)
        place += permutation(self.column_size).take(rank)
        # Modulo S without a division: below S the subtraction wraps to a huge number.
        place = np.minimum(place, place - np.uint32(self.column_size))
        positions: IntArray = place.astype(np.int64) * self.num_columns + column
        return positions

    def id_at(self, positions: npt.ArrayLike) -> IntArray:
        """Rows at positions, the exact inverse of `position`.

        Args:
            positions: ``[N]`` integers; those outside [0, P) hold no row.

        Returns:
            ``[N]`` int64 ids, -1 where a position holds no row.
        """
        positions = np.ascontiguousarray(positions, dtype=np.int64)
        inside = (positions >= 0) & (positions < self.num_positions)
        positions = np.where(inside, positions, 0)
        place = positions // self.num_columns
        column = positions - place * self.num_columns
        offset = place.astype(np.uint32)
        offset -= _rotation(column, self.num_columns, self.column_size)
        # Where the subtraction wrapped, adding S wraps back; elsewhere it only makes it larger.
        offset = np.minimum(offset, offset + np.uint32(self.column_size))
        rank = _id_order(self.column_size).take(offset)
        ids = column * self.column_size + rank
        return np.where(inside & (ids < self.vocabulary_size), ids, -1)


@functools.lru_cache(maxsize=MAX_CACHED)
def _id_order(size: int) -> npt.NDArray[np.uint16]:
    """``id_order[v]`` is the r at place v: 0 .. size-1 sorted by splitmix64's first outputs.

    The mixer is a bijection of 64-bit integers (Steele, Lea, Flood 2014), so there are no ties
    and the order does not depend on the sorting algorithm.
    """
    z = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    order = np.argsort(z).astype(np.uint16)
    order.setflags(write=False)
    return order


@functools.lru_cache(maxsize=MAX_CACHED)
def permutation(size: int) -> npt.NDArray[np.uint16]:
    """``permutation[r]`` is the place v of r, the inverse of `_id_order`."""
    forward = np.empty(size, np.uint16)
    forward[_id_order(size)] = np.arange(size, dtype=np.uint16)
    forward.setflags(write=False)
    return forward


def _rotation(column: IntArray, num_columns: int, size: int) -> npt.NDArray[np.uint32]:
    """Rotation of each column, uint32 in [0, size)."""
    if num_columns <= MAX_ROTATION_TABLE:
        return _rotation_table(num_columns, size).take(column)
    return _mix_rotation(column, size)


@functools.lru_cache(maxsize=MAX_CACHED)
def _rotation_table(num_columns: int, size: int) -> npt.NDArray[np.uint32]:
    """Rotations of all columns."""
    table = _mix_rotation(np.arange(num_columns, dtype=np.int64), size)
    table.setflags(write=False)
    return table


def _mix_rotation(column: IntArray, size: int) -> npt.NDArray[np.uint32]:
    """``fmix32(column) * size >> 32``; fmix32 is the finaliser of MurmurHash3 (Appleby)."""
    h = column.astype(np.uint32)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return ((h.astype(np.uint64) * np.uint64(size)) >> np.uint64(32)).astype(np.uint32)
