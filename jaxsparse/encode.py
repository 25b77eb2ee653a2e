# SPDX-License-Identifier: Apache-2.0
"""One feature of a raw batch becomes addressed ids: checks, padding, truncation, keys to rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.fingerprint import as_array
from jaxsparse.hashing import Identity
from jaxsparse.layout import TableBlock
from jaxsparse.ragged import Ragged, row_splits_from_lengths
from jaxsparse.specs import FeatureSpec

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Find = Callable[[npt.NDArray[Any]], tuple[Int64s, Bools | None]]


@dataclasses.dataclass(frozen=True)
class FixedIds:
    """Ids of a feature that has the same number of ids in every sample."""

    codes: Int64s
    """``[B, L]``: shard * rows_per_shard + local row; NOTHING never occurs."""


@dataclasses.dataclass(frozen=True)
class RaggedIds:
    """Ids of any other feature, without padding and what truncation cut."""

    codes: Int64s
    """``[n]``, sample by sample."""
    splits: Int64s
    """``[B + 1]``: where each sample's ids begin, and n."""
    lengths: Int64s
    """``[B]``: ids per bag; for an unpooled feature the position after the last id."""
    weights: npt.NDArray[np.float32] | None
    """``[n]``."""
    given_position: Int64s | None
    """``[n]``: place of each id in its bag; None is 0, 1, ... in every one."""
    given_index: Int64s | None
    """``[n]``: index of each id among the user's values; None where all of them are ids."""
    num_values: int
    ignored: int

    @functools.cached_property
    def value_index(self) -> Int64s:
        """``[n]``: index of each id among the user's values."""
        return np.arange(self.num_values) if self.given_index is None else self.given_index


def num_bags(feature: str, value: Any) -> int:
    """Samples in one feature's input; validates its type and rank."""
    if isinstance(value, Ragged):
        return value.num_bags
    array = _keys_of(feature, value)
    if array.ndim not in (1, 2):
        raise ValueError(
            f"feature {feature!r}: expected keys [B], [B, L] or a Ragged, "
            f"got an array of shape {array.shape}"
        )
    return int(array.shape[0])


def _keys_of(feature: str, value: Any) -> npt.NDArray[Any]:
    """An array as it is; Python lists without numpy's guesses, such as text for ``["a", 1]``."""
    try:
        return as_array(value)
    except ValueError as error:
        raise ValueError(f"feature {feature!r}: {error}") from error


def keys_may_be_nothing(spec: FeatureSpec) -> bool:
    """Whether some keys look nothing up, so that bags differ in length."""
    if spec.padding_id is not None:
        return True
    keys = spec.table.keys
    return isinstance(keys, Identity) and keys.out_of_range == "ignore"


def encode(
    spec: FeatureSpec, block: TableBlock, rows_per_shard: int, num_shards: int, value: Any
) -> FixedIds | RaggedIds:
    """Addresses the keys of one feature.

    Args:
        spec: the feature.
        block: where its table lies in the slab.
        rows_per_shard: R of the slab.
        num_shards: devices the slab is cut over.
        value: ``[B]`` or ``[B, L]`` keys, or a Ragged.

    Raises:
        ValueError, TypeError: naming the feature and the offending value.
    """

    def find(keys: npt.NDArray[Any]) -> tuple[Int64s, Bools | None]:
        keys_of: Any = spec.table.keys  # of a plain table, or the places of a stored one
        ids = keys_of.rows(keys, spec.table.vocabulary_size)
        shard, local_row = block.locate(np.maximum(ids, 0), num_shards)
        return shard * rows_per_shard + local_row, ids >= 0

    return encode_with(spec, find, value)


def encode_with(spec: FeatureSpec, find: Find, value: Any) -> FixedIds | RaggedIds:
    """Checks, padding and truncation of one feature, whatever its keys become.

    Args:
        spec: the feature.
        find: from keys ``[n]`` to codes ``[n]`` int64, and which of them look something up (None
            for all).
        value: ``[B]`` or ``[B, L]`` keys, or a Ragged.

    Raises:
        ValueError, TypeError: naming the feature and the offending value.
    """

    def codes_of(keys: npt.NDArray[Any]) -> tuple[Int64s, Bools | None]:
        try:
            return find(keys)
        except (ValueError, TypeError) as error:
            raise type(error)(f"feature {spec.name!r}: {error}") from error

    if isinstance(value, Ragged):
        try:
            # Checked anew: a reader may have filled its arrays anew.
            value = Ragged(value.values, value.row_splits, value.weights)
        except ValueError as error:
            raise ValueError(f"feature {spec.name!r}: {error}") from error
        weights = _checked_weights(spec.name, value)
        return _encode_ragged(spec, codes_of, value.values, value.lengths, weights)
    array = _keys_of(spec.name, value)
    if array.ndim == 1:
        array = array[:, None]
    num_samples, width = array.shape
    if keys_may_be_nothing(spec) or width == 0:
        lengths = np.full(num_samples, width, np.int64)
        return _encode_ragged(spec, codes_of, array.reshape(-1), lengths, None)
    if spec.max_length is not None and width > spec.max_length:
        _refuse_long_bag(spec, width, sample=0)
        array = (
            array[:, : spec.max_length]
            if spec.truncate == "head"
            else (array[:, width - spec.max_length :])
        )
    return FixedIds(codes_of(array.reshape(-1))[0].reshape(array.shape))


def _encode_ragged(
    spec: FeatureSpec,
    codes_of: Find,
    values: npt.NDArray[Any],
    bag_lengths: Int64s,
    weights: npt.NDArray[np.float32] | None,
) -> RaggedIds:
    sample = np.repeat(np.arange(bag_lengths.size), bag_lengths)
    position = np.arange(values.size) - np.repeat(np.cumsum(bag_lengths) - bag_lengths, bag_lengths)
    index = np.arange(values.size)
    if spec.padding_id is not None:
        index = np.flatnonzero(_differs(spec, values))
    codes, found = codes_of(values[index])
    ignored = 0
    if found is not None:
        ignored = int(found.size - found.sum())
        index, codes = index[found], codes[found]
    sample, position = sample[index], position[index]
    lengths = np.bincount(sample, minlength=bag_lengths.size)
    if spec.combiner is not None:
        # Places that held nothing do not count: close the gaps.
        position = np.arange(index.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    else:
        lengths = np.zeros(bag_lengths.size, np.int64)
        lengths[sample] = position + 1  # ascending, so the last id of each bag stays
    if spec.max_length is not None and lengths.size and lengths.max() > spec.max_length:
        longest = int(lengths.argmax())
        _refuse_long_bag(spec, int(lengths[longest]), longest)
        cut = np.maximum(lengths - spec.max_length, 0)
        if spec.truncate == "tail":
            position = position - cut[sample]
        kept = (position >= 0) & (position < spec.max_length)
        index, codes, sample, position = index[kept], codes[kept], sample[kept], position[kept]
        lengths = np.minimum(lengths, spec.max_length)
        if spec.combiner is None:
            lengths = np.zeros(bag_lengths.size, np.int64)
            lengths[sample] = position + 1
    return RaggedIds(
        codes=codes,
        splits=row_splits_from_lengths(np.bincount(sample, minlength=bag_lengths.size)),
        lengths=lengths,
        weights=None if weights is None else weights[index],
        given_position=position,
        given_index=index,
        num_values=values.size,
        ignored=ignored,
    )


def _differs(spec: FeatureSpec, values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Where ``values`` are not the padding id; compared as integers of any width."""
    padding = spec.padding_id
    if values.dtype.kind in "iu" and not isinstance(padding, str):
        assert padding is not None
        limits = np.iinfo(values.dtype)
        if not limits.min <= padding <= limits.max:
            return np.ones(values.shape, bool)
        differs: npt.NDArray[np.bool_] = values != values.dtype.type(padding)
        return differs
    return np.array([value != padding for value in values.tolist()], bool)


def _refuse_long_bag(spec: FeatureSpec, length: int, sample: int) -> None:
    if spec.truncate == "error":
        raise ValueError(
            f"feature {spec.name!r}: sample {sample} has {length} ids, max_length is "
            f"{spec.max_length}; set truncate='head' or 'tail' to cut longer bags"
        )


def _checked_weights(feature: str, ragged: Ragged) -> npt.NDArray[np.float32] | None:
    if ragged.weights is None:
        return None
    weights = np.asarray(ragged.weights, np.float32)
    bad = np.flatnonzero(~np.isfinite(weights))
    if bad.size:
        raise ValueError(
            f"feature {feature!r}: weight {weights[bad[0]]} at position {bad[0]} is not finite"
        )
    return weights
