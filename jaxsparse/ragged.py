# SPDX-License-Identifier: Apache-2.0
"""Bags of keys of unequal length, as flat numpy arrays."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.key_arrays import chain_keys, concatenate_keys, key_array, unmasked

Array = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


def row_splits_from_lengths(lengths: npt.ArrayLike) -> Int64s:
    """Where each bag begins, and the last one ends.

    Args:
        lengths: ``[B]`` non-negative integers of any dtype; their sum may exceed 2**31.

    Returns:
        ``[B + 1]`` int64: 0 and the running sums.

    Raises:
        ValueError: ``lengths`` is not one-dimensional, or negative somewhere.
        TypeError: ``lengths`` are no integers.

    >>> row_splits_from_lengths([2, 0, 1])
    array([0, 2, 2, 3])
    """
    array = _int64_vector("lengths", lengths)
    if array.size and array.min() < 0:
        bag = int(array.argmin())
        raise ValueError(f"`lengths` must not be negative, got {array[bag]} at bag {bag}")
    splits = np.zeros(len(array) + 1, np.int64)
    np.cumsum(array, out=splits[1:])
    return splits


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
    """``B`` bags of keys, one after another.

    Bag ``b`` is ``values[row_splits[b] : row_splits[b + 1]]``; here bag 1 is empty::

        bag            0       1       2
                    ┌─────┐   ┌┐   ┌───────┐
        values      [ 7  3          7  9  1 ]
        weights     [.5 .5          1. 2. 1.]
        row_splits    0          2  2         5

    >>> clicked = Ragged.from_lists([[7, 3], [], [7, 9, 1]])
    >>> clicked.values, clicked.row_splits
    (array([7, 3, 7, 9, 1]), array([0, 2, 2, 5]))
    """

    values: Array
    """Keys of all bags, [N]: integers or strings (`jaxsparse.hashing` says which)."""

    row_splits: Int64s
    """Begin of each bag and end of the last one, [B + 1] int64; starts with 0, ends with N."""

    weights: Float32s | None = None
    """Factor of each key in its bag's sum, [N] float32; None is 1 for all."""

    def __post_init__(self) -> None:
        """Validates the arrays and settles their dtypes."""
        values = key_array(self.values)
        if values.ndim != 1:
            raise ValueError(f"`values` must have one dimension, got shape {values.shape}")
        splits = _int64_vector("row_splits", self.row_splits)
        _check_row_splits(splits, len(values))
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "row_splits", splits)
        if self.weights is not None:
            object.__setattr__(self, "weights", _weights_array(self.weights, len(values)))

    @classmethod
    def from_lists(
        cls,
        lists: Sequence[Sequence[Any] | Array],
        weights: Sequence[Sequence[float] | Array] | None = None,
    ) -> Ragged:
        """From one list of keys per bag, and one list of as many weights.

        Args:
            lists: ``B`` sequences of integers or strings.
            weights: ``B`` sequences of floats, as long as those of ``lists``; None is 1.

        Raises:
            TypeError: a bag is no list.
            ValueError: keys and weights of a bag differ in number.

        >>> Ragged.from_lists([["a"], [], ["b", "a"]]).lengths
        array([1, 0, 2])
        """
        lengths = _bag_lengths("lists", lists)
        flat_weights: Any = None
        if weights is not None:
            _check_equal_lengths(lengths, _bag_lengths("weights", weights))
            flat_weights = chain_keys(weights)
        splits = row_splits_from_lengths(lengths)
        return cls(key_array(chain_keys(lists)), splits, flat_weights)

    @classmethod
    def from_lengths(
        cls, values: npt.ArrayLike, lengths: npt.ArrayLike, weights: npt.ArrayLike | None = None
    ) -> Ragged:
        """From flat keys ``[N]`` and the number of keys in each bag, ``[B]``.

        >>> Ragged.from_lengths([7, 3, 9], [2, 0, 1]).row_splits
        array([0, 2, 2, 3])
        """
        splits = row_splits_from_lengths(lengths)
        array = key_array(values)
        if array.ndim == 1 and splits[-1] != len(array):
            raise ValueError(
                f"`lengths` must add up to the number of values, {len(array)}, got {splits[-1]}"
            )
        return cls(array, splits, weights)  # type: ignore[arg-type]

    @classmethod
    def from_arrow(cls, column: Any, weights: Any = None) -> Ragged:
        """From pyarrow list columns (array or chunked array, of any list type), read exactly.

        A null list is an empty bag. Chunks are read one by one: their 32-bit offsets are never
        added up in arrow.

        Args:
            column: ``B`` lists of keys, plain or dictionary-encoded.
            weights: ``B`` lists of floats of the same lengths; None is 1.

        Raises:
            TypeError: a column holds no lists.
            ValueError: a null inside a list, or lengths that differ.
        """
        # Imported late: pyarrow takes a while, and only readers of arrow data need it.
        from jaxsparse.arrow import list_chunks

        keys = cls.concatenate([cls.from_lengths(*chunk) for chunk in list_chunks(column)])
        if weights is None:
            return keys
        factors = cls.concatenate([cls.from_lengths(*chunk) for chunk in list_chunks(weights)])
        _check_equal_lengths(keys.lengths, factors.lengths)
        return cls(keys.values, keys.row_splits, factors.values)

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Ragged:
        """All bags of ``parts``, in order.

        Raises:
            ValueError: some parts have weights and others none.
            TypeError: keys that share no exact dtype, such as integers and strings, or int64 and
                uint64.
        """
        weighted = [part.weights is not None for part in parts]
        if any(weighted) and not all(weighted):
            raise ValueError(
                f"part {weighted.index(True)} has weights and part {weighted.index(False)} has "
                f"none; give the latter weights of 1"
            )
        lengths = [part.lengths for part in parts]
        splits = row_splits_from_lengths(np.concatenate([np.zeros(0, np.int64), *lengths]))
        weights = [part.weights for part in parts if part.weights is not None]
        values = concatenate_keys([part.values for part in parts])
        return cls(values, splits, np.concatenate(weights) if weights else None)

    @property
    def lengths(self) -> Int64s:
        """Number of keys in each bag, [B] int64."""
        return np.diff(self.row_splits)

    @property
    def num_bags(self) -> int:
        """B."""
        return len(self.row_splits) - 1

    def __len__(self) -> int:
        """Number of bags."""
        return self.num_bags

    def __iter__(self) -> Iterator[Array]:
        """The keys of each bag, as views."""
        for begin, end in itertools.pairwise(self.row_splits.tolist()):
            yield self.values[begin:end]

    def slice(self, start: int, stop: int) -> Ragged:
        """Bags ``start`` to ``stop - 1``, clipped to those there are; keys are views.

        >>> Ragged.from_lists([[1], [2, 3], [4]]).slice(1, 9).values
        array([2, 3, 4])
        """
        start, stop, _ = slice(start, stop).indices(self.num_bags)
        stop = max(start, stop)
        begin, end = self.row_splits[start], self.row_splits[stop]
        weights = None if self.weights is None else self.weights[begin:end]
        splits = self.row_splits[start : stop + 1] - begin
        return Ragged(self.values[begin:end], splits, weights)

    def take(self, indices: npt.ArrayLike) -> Ragged:
        """The bags of ``indices`` ``[M]``, in that order; a bag may be taken several times.

        Raises:
            IndexError: an index is outside 0..B - 1.

        >>> Ragged.from_lists([[1], [2, 3], []]).take([1, 2, 0, 1]).values
        array([2, 3, 1, 2, 3])
        """
        bags = _int64_vector("indices", indices)
        outside = (bags < 0) | (bags >= self.num_bags)
        if outside.any():
            at = int(outside.argmax())
            raise IndexError(f"index {bags[at]} at position {at} is outside 0..{self.num_bags - 1}")
        lengths = self.lengths[bags]
        splits = row_splits_from_lengths(lengths)
        # Positions count up by one but for a jump at the begin of every bag.
        jumps = self.row_splits[bags] - splits[:-1]
        positions = np.arange(splits[-1]) + np.repeat(jumps, lengths)
        weights = None if self.weights is None else self.weights[positions]
        return Ragged(self.values[positions], splits, weights)


def _int64_vector(name: str, data: npt.ArrayLike) -> Int64s:
    array = np.asarray(unmasked(f"`{name}`", data))
    if array.ndim != 1:
        raise ValueError(f"`{name}` must have one dimension, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"`{name}` must be integers, got {array.dtype}")
    return array.astype(np.int64, copy=False)


def _check_row_splits(splits: Int64s, num_values: int) -> None:
    if not len(splits):
        raise ValueError("`row_splits` must have B + 1 entries, got none; no bags is [0]")
    if splits[0] == 0 and splits[-1] == num_values and (splits[1:] >= splits[:-1]).all():
        return
    if splits.min() >= 0 and splits.sum() == num_values:
        raise ValueError(
            f"`row_splits` must rise from 0 to the number of values, {num_values}, but adds up to "
            f"it; did you pass lengths? use `Ragged.from_lengths`"
        )
    if splits[0] != 0 or splits[-1] != num_values:
        raise ValueError(
            f"`row_splits` must start with 0 and end with the number of values, {num_values}, "
            f"got {splits[0]} and {splits[-1]}"
        )
    bag = int((splits[1:] < splits[:-1]).argmax())
    raise ValueError(
        f"`row_splits` must not fall, got {splits[bag]} then {splits[bag + 1]} at bag {bag}"
    )


def _weights_array(data: npt.ArrayLike, num_values: int) -> Float32s:
    array = np.asarray(unmasked("`weights`", data))
    if array.shape != (num_values,):
        raise ValueError(
            f"`weights` must have one entry per value, shape ({num_values},), got {array.shape}"
        )
    if array.size and array.dtype.kind not in "iufV":  # V: bfloat16
        raise TypeError(f"`weights` must be numbers, got {array.dtype}")
    return array.astype(np.float32, copy=False)


def _bag_lengths(name: str, lists: Sequence[Any]) -> Int64s:
    for bag, items in enumerate(lists):
        if isinstance(items, AbstractSet | Mapping):
            raise TypeError(
                f"`{name}` must hold one list per bag, got the {type(items).__name__} {items!r} at "
                f"bag {bag}, whose order means nothing; make it a list"
            )
        if isinstance(items, str | bytes) or not hasattr(items, "__len__"):
            raise TypeError(
                f"`{name}` must hold one list per bag, got {items!r} at bag {bag}; "
                f"an empty bag is []"
            )
    return np.fromiter(map(len, lists), np.int64, len(lists))


def _check_equal_lengths(keys: Int64s, weights: Int64s) -> None:
    if len(keys) != len(weights):
        raise ValueError(f"there are {len(keys)} bags of keys but {len(weights)} of weights")
    differs = keys != weights
    if differs.any():
        bag = int(differs.argmax())
        raise ValueError(f"bag {bag} has {keys[bag]} keys but {weights[bag]} weights")
