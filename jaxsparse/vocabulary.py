# SPDX-License-Identifier: Apache-2.0
"""Counting keys: which of them are frequent enough to get rows of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jaxsparse.arrow import decoded, is_text
from jaxsparse.ragged import Ragged

Array = npt.NDArray[Any]


class KeyCounts:
    """How often each key of a feature came; batch by batch, exactly.

    What is held grows with the distinct keys. The most frequent ones are for
    ``Hashed(exact_keys=...)``, which gives them rows of their own and hashes the rest.

    >>> seen = KeyCounts()
    >>> seen.update(["a", "a", None, "b"])
    >>> seen.num_keys, seen.num_occurrences, seen.num_nulls
    (2, 3, 1)
    >>> seen.top(1)
    array(['a'], dtype=object)
    """

    def __init__(self) -> None:
        """Nothing was counted."""
        self.num_nulls = 0
        self._kind: Any = None
        self._table: pa.Table | None = None

    @property
    def num_keys(self) -> int:
        """Distinct keys."""
        return 0 if self._table is None else self._table.num_rows

    @property
    def num_occurrences(self) -> int:
        """Keys in all, nulls left out."""
        return 0 if self._table is None else pc.sum(self._table["counts"]).as_py() or 0

    def update(self, keys: Any) -> None:
        """Counts keys, each occurrence once.

        Args:
            keys: integers or strings: numpy ``[N]`` or ``[B, L]``, a `Ragged`, a column of pyarrow,
                pandas or polars, or a list; what is null in it is counted apart.

        Raises:
            TypeError: the keys are neither integers nor strings, or were of the other kind before.
        """
        column = _column(keys)
        if pa.types.is_null(column.type):
            self.num_nulls += len(column)
            return
        column = _plain(column)
        if self._kind is None:
            self._kind = column.type
        if column.type != self._kind:
            raise TypeError(f"KeyCounts: keys were {self._kind} before, now they are {column.type}")
        self.num_nulls += column.null_count
        found = pc.value_counts(column.drop_null())
        new = pa.table({"keys": found.field("values"), "counts": found.field("counts")})
        if self._table is None:
            self._table = new
            return
        both = pa.concat_tables([self._table, new]).group_by("keys").aggregate([("counts", "sum")])
        self._table = both.rename_columns({"counts_sum": "counts"}).select(["keys", "counts"])

    def top(self, num_keys: int | None = None, min_count: int = 1) -> Array:
        """The most frequent keys, most frequent first, of equal ones the smaller key.

        Args:
            num_keys: at most so many; None for all.
            min_count: keys that came less often are left out.

        Returns:
            ``[n]`` int64 or uint64, or strings in an object array.
        """
        keys: Array = self._sorted(num_keys, min_count)["keys"].to_numpy()
        return keys

    def counts(self, num_keys: int | None = None, min_count: int = 1) -> npt.NDArray[np.int64]:
        """``[n]`` int64: how often each key of `top` came."""
        counts: npt.NDArray[np.int64] = self._sorted(num_keys, min_count)["counts"].to_numpy()
        return counts

    def _sorted(self, num_keys: int | None, min_count: int) -> Any:
        if min_count < 1 or (num_keys is not None and num_keys < 0):
            raise ValueError(
                f"KeyCounts: num_keys must be None or >= 0 and min_count >= 1, got {num_keys} and "
                f"{min_count}"
            )
        if self._table is None:
            return pa.schema({"keys": pa.int64(), "counts": pa.int64()}).empty_table()
        kept = self._table.filter(pc.greater_equal(self._table["counts"], min_count))
        kept = kept.sort_by([("counts", "descending"), ("keys", "ascending")])
        return kept if num_keys is None else kept.slice(0, num_keys)


def _column(keys: Any) -> Any:
    """The keys as an arrow column, lists flattened."""
    if isinstance(keys, Ragged):
        keys = keys.values
    if isinstance(keys, np.ndarray):
        keys = keys.reshape(-1)
    if hasattr(keys, "to_arrow"):  # polars
        keys = keys.to_arrow()
    if not isinstance(keys, pa.Array | pa.ChunkedArray):
        keys = _as_arrow(keys)
    column = pa.chunked_array([keys]) if isinstance(keys, pa.Array) else keys
    types = pa.types
    while any(
        f(column.type) for f in (types.is_list, types.is_large_list, types.is_fixed_size_list)
    ):
        column = pc.list_flatten(column)
    return column


def _as_arrow(keys: Any) -> Any:
    try:
        try:
            return pa.array(keys, from_pandas=True)
        except OverflowError:  # arrow takes Python's integers for int64
            return pa.array(keys, pa.uint64(), from_pandas=True)
    except (pa.ArrowException, OverflowError) as error:
        raise TypeError(f"KeyCounts: keys must be integers or strings: {error}") from error


def _plain(column: Any) -> Any:
    """As int64, uint64 or large_string."""
    if pa.types.is_dictionary(column.type):
        chunks = [decoded(chunk) for chunk in column.chunks]
        column = pa.chunked_array(chunks, column.type.value_type)
    kind = column.type
    if is_text(kind):
        # The bytes of text and the text are one key, as they are to the hash.
        return column.cast(pa.large_string())
    if not pa.types.is_integer(kind):
        raise TypeError(f"KeyCounts: keys must be integers or strings, got {kind}")
    return column.cast(pa.uint64() if kind == pa.uint64() else pa.int64())
