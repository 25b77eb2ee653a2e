# SPDX-License-Identifier: Apache-2.0
"""Lists of keys out of pyarrow columns, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Array = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]


def reader_of(data: bytes) -> Any:
    """A reader of a copy of ``data`` in arrow's own memory.

    Arrow's threads may be the last to let go of what they read. Where that is an object of Python's
    and Python has begun to end, the whole process aborts (github.com/apache/arrow/issues/34314).
    """
    buffer = pa.allocate_buffer(len(data))
    memoryview(buffer).cast("B")[:] = data
    return pa.BufferReader(buffer)


def is_text(kind: Any) -> bool:
    """Whether arrays of a type hold strings or bytes, not as a dictionary."""
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
    )


def decoded(chunk: Any) -> Any:
    """The values of a dictionary-encoded array."""
    values = chunk.dictionary
    # Arrow cannot take from string views, which is what polars gives.
    if pa.types.is_string_view(values.type):
        values = values.cast(pa.large_string())
    elif pa.types.is_binary_view(values.type):
        values = values.cast(pa.large_binary())
    return values.take(chunk.indices)


def decoded_text(column: Any) -> Any:
    """Text of any encoding as large strings; other columns, and bytes that are no UTF-8, as is."""
    kind = column.type
    value_kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not is_text(value_kind):
        return column
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    if value_kind != kind:
        chunks = [decoded(chunk) for chunk in chunks]
    # Large: what a dictionary stands for may exceed the 32-bit offsets of plain strings.
    try:
        return pa.chunked_array([c.cast(pa.large_string()) for c in chunks], pa.large_string())
    except pa.ArrowInvalid:
        return column


def list_chunks(column: Any) -> Iterator[tuple[Array, Int64s]]:
    """Flat values ``[N]`` and list lengths ``[B]`` of each chunk of a list column.

    Raises:
        TypeError: ``column`` holds no lists.
        ValueError: a null inside a list; the message names the list.
    """
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list and not pa.types.is_fixed_size_list(kind):
        raise TypeError(f"expected a pyarrow column of lists, got {kind}")
    num_bags_before = 0
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        counts = pc.list_value_length(chunk).fill_null(0)
        lengths = counts.to_numpy(zero_copy_only=False).astype(np.int64)
        # flatten() honours slices and leaves out what lies under null lists; .values does neither.
        flat = chunk.flatten()
        if pa.types.is_dictionary(flat.type):
            flat = decoded(flat)
        if flat.null_count:
            first_null = int(np.argmax(flat.is_null().to_numpy(zero_copy_only=False)))
            bag = int(np.searchsorted(np.cumsum(lengths), first_null, side="right"))
            raise ValueError(f"null inside the list of bag {num_bags_before + bag}")
        yield flat.to_numpy(zero_copy_only=False), lengths
        num_bags_before += len(lengths)
