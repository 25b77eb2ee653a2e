# SPDX-License-Identifier: Apache-2.0
"""Addresses the keys of a slab's features, all in one native call where that is possible.

What is not plain (strings, lists, odd dtypes) and what has to be refused goes feature by feature
through `encode`, which has the messages.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.addressing import permutation
from jaxsparse.encode import FixedIds, RaggedIds, encode, keys_may_be_nothing
from jaxsparse.fingerprint import MASK64, mix64
from jaxsparse.hashing import Hashed, Identity
from jaxsparse.layout import SlabLayout, TableBlock
from jaxsparse.ops.native import library
from jaxsparse.ops.packing.keys import Feature
from jaxsparse.ops.packing.keys import encode as encode_natively
from jaxsparse.ops.packing.native import address
from jaxsparse.ragged import Ragged
from jaxsparse.specs import FeatureSpec

Array = npt.NDArray[Any]

NATIVE_DTYPES = tuple(np.dtype(kind) for kind in (np.int64, np.uint64, np.int32))
"""Of keys that are read as they are."""

TRUNCATIONS = {"error": 0, "head": 1, "tail": 2}


@dataclasses.dataclass(frozen=True, eq=False)
class SlabEncoder:
    """Made once for a collection; holds what the kernel has to know of every table."""

    slab: SlabLayout
    specs: tuple[FeatureSpec, ...]
    """Features of the slab's tables, in the collection's order."""
    num_shards: int

    def encode(self, features: Mapping[str, Any]) -> dict[str, FixedIds | RaggedIds]:
        """Addressed ids of every feature.

        Raises:
            ValueError, TypeError: as `jaxsparse.encode.encode`, of the first feature with an error.
        """
        native = self._encode_natively(features) if library.is_available() else {}
        return {
            spec.name: native[spec.name]
            if spec.name in native
            else encode(
                spec,
                self._blocks[spec.table.name],
                self.slab.rows_per_shard,
                self.num_shards,
                features[spec.name],
            )
            for spec in self.specs
        }

    def _encode_natively(self, features: Mapping[str, Any]) -> dict[str, FixedIds | RaggedIds]:
        """Ids of those features that the kernel takes and finds nothing wrong with."""
        known, _ = self._known
        entries = type(known).from_buffer_copy(known)
        parts = [
            _native_part(spec, features[spec.name]) if entry.num_columns else None
            for spec, entry in zip(self.specs, entries, strict=True)
        ]
        # One block for the results of all: small allocations add up.
        block = np.empty(sum(part.room for part in parts if part), np.int64)
        start, first_byte = 0, address(block)
        for part, entry in zip(parts, entries, strict=True):
            if part:
                part.enter(entry, block[start : start + part.room], first_byte + 8 * start)
                start += part.room
        encode_natively(entries, len(entries))
        return {
            spec.name: part.ids(entry)
            for spec, part, entry in zip(self.specs, parts, entries, strict=True)
            if part and not entry.status
        }

    @functools.cached_property
    def _blocks(self) -> dict[str, TableBlock]:
        return {block.spec.name: block for block in self.slab.tables}

    @functools.cached_property
    def _known(self) -> tuple[Any, list[Array]]:
        """An array of `Feature` without a batch, and the numpy arrays that it points to.

        Features that the kernel cannot address have no columns.
        """
        entries = (Feature * len(self.specs))()
        kept: list[Array] = []
        for entry, spec in zip(entries, self.specs, strict=True):
            block, keys = self._blocks[spec.table.name], spec.table.keys
            order = block.addressing
            kept.append(permutation(order.column_size))
            entry.permutation = address(kept[-1])
            entry.vocabulary_size = spec.table.vocabulary_size
            entry.column_size, entry.num_columns = order.column_size, order.num_columns
            is_cut = block.placement == "sharded" and self.num_shards > 1
            entry.block_rows = block.rows if is_cut else 0
            entry.first_code = (block.shard or 0) * self.slab.rows_per_shard + block.offset
            entry.rows_per_shard = self.slab.rows_per_shard
            entry.is_unpooled = spec.combiner is None
            entry.max_length = spec.max_length or 0
            entry.truncation = TRUNCATIONS[spec.truncate]
            if isinstance(keys, Identity):
                entry.is_ignoring = keys.out_of_range == "ignore"
            elif isinstance(keys, Hashed):  # Dynamic keys never get here: their tables are stored
                kept += _enter_hash(entry, keys)
        return entries, kept


def _enter_hash(entry: Feature, keys: Hashed) -> list[Array]:
    entry.is_hashed = 1
    entry.is_seeded = keys.seed != 0
    entry.mixed_seed = int(mix64(np.array([keys.seed], np.uint64))[0])
    entry.num_exact = keys.num_exact_keys
    if not keys.num_exact_keys:
        return []
    if keys.exact_keys.dtype != np.uint64:
        # Exact strings and integer keys: an error, which `encode` tells.
        entry.num_columns = 0
        return []
    index = keys.index
    entry.exact_position = address(index.position)
    entry.exact_fingerprint = address(index.fingerprint)
    entry.exact_shift, entry.exact_mask = int(index.shift), int(index.last_slot)
    return [index.position, index.fingerprint]


@dataclasses.dataclass(slots=True)
class _NativePart:
    """One feature of a batch, in the form the kernel takes."""

    keys: Array
    """Contiguous, of one of `NATIVE_DTYPES`."""
    num_bags: int
    width: int
    """Keys per bag, 0 where they differ."""
    splits: Array | None
    weights: Array | None
    is_filtered: bool
    has_padding: bool
    padding: int
    room: int
    """int64 words for its results."""
    block: Array | None = None
    """The results, once `enter` has named a place for them."""

    def enter(self, entry: Feature, block: Array, start: int) -> None:
        """Completes the kernel's entry; results go to ``block``, which lies at ``start``."""
        keys, self.block = self.keys, block
        entry.keys, entry.num_keys = address(keys), keys.size
        entry.is_int32 = keys.dtype.itemsize == 4
        entry.codes = start
        if self.room == keys.size:
            return
        entry.is_filtered, entry.has_padding = self.is_filtered, self.has_padding
        entry.padding = self.padding & MASK64
        entry.num_bags, entry.width = self.num_bags, self.width
        entry.splits = address(self.splits)
        entry.out_splits = start + 8 * keys.size
        entry.lengths = entry.out_splits + 8 * (self.num_bags + 1)
        entry.index = entry.lengths + 8 * self.num_bags
        entry.position = entry.index + 8 * keys.size

    def ids(self, entry: Feature) -> FixedIds | RaggedIds:
        """What the kernel made of them."""
        size, block = self.keys.size, self.block
        assert block is not None
        if self.room == size:
            return FixedIds(block.reshape(self.num_bags, self.width))
        splits = block[size : size + self.num_bags + 1]
        lengths = block[size + splits.size : size + splits.size + self.num_bags]
        count, index, weights = int(splits[-1]), None, self.weights
        rest = block[size + splits.size + lengths.size :]
        if self.is_filtered:
            index = rest[:count]
            weights = None if weights is None else weights[index]
        is_gappy = self.is_filtered and entry.is_unpooled
        return RaggedIds(
            codes=block[:count],
            splits=splits,
            lengths=lengths,
            weights=weights,
            given_position=rest[size : size + count] if is_gappy else None,
            given_index=index,
            num_values=size,
            ignored=entry.ignored,
        )


def _native_part(spec: FeatureSpec, value: Any) -> _NativePart | None:
    """None where only `encode` knows what to do."""
    may_be_nothing = keys_may_be_nothing(spec)
    splits = weights = None
    width = 0
    if isinstance(value, Ragged):
        keys, splits, weights = value.values, np.ascontiguousarray(value.row_splits), value.weights
        num_bags = splits.size - 1
        if weights is not None and not np.isfinite(weights).all():
            return None
        is_filtered = may_be_nothing or (spec.max_length is not None and spec.truncate != "error")
    else:
        # Subclasses, such as masked arrays, mean more than their memory.
        if type(value) is not np.ndarray or value.ndim not in (1, 2):
            return None
        keys, is_filtered = value, may_be_nothing
        num_bags, width = value.shape if value.ndim == 2 else (value.size, 1)
        if width == 0:
            return None
        if not is_filtered and spec.max_length is not None and width > spec.max_length:
            if spec.truncate == "error":
                return None
            cut = width - spec.max_length
            keys = keys[:, : spec.max_length] if spec.truncate == "head" else keys[:, cut:]
            width = spec.max_length
    if keys.dtype not in NATIVE_DTYPES:
        if keys.dtype.kind not in "iu":
            return None
        # uint64 of the other byte order stays so: int64 does not hold a padding id above 2**63.
        keys = keys.astype(
            np.uint64 if keys.dtype.itemsize == 8 and keys.dtype.kind == "u" else np.int64
        )
    size = keys.size
    room = size
    if splits is not None or is_filtered:
        room += 2 * num_bags + 1 + (2 * size if is_filtered else 0)
    padding = spec.padding_id if isinstance(spec.padding_id, int | np.integer) else None
    has_padding = padding is not None and _holds(keys.dtype, int(padding))
    return _NativePart(
        np.ascontiguousarray(keys),
        num_bags,
        width,
        splits,
        weights,
        is_filtered,
        has_padding,
        int(padding or 0),
        room,
    )


def _holds(dtype: np.dtype[Any], value: int) -> bool:
    limits = np.iinfo(dtype)
    return int(limits.min) <= value <= int(limits.max)
