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
        if flat.null_count:
            first_null = int(np.argmax(flat.is_null().to_numpy(zero_copy_only=False)))
            bag = int(np.searchsorted(np.cumsum(lengths), first_null, side="right"))
            raise ValueError(f"null inside the list of bag {num_bags_before + bag}")
        if pa.types.is_dictionary(flat.type):
            flat = flat.dictionary_decode()
        yield flat.to_numpy(zero_copy_only=False), lengths
        num_bags_before += len(lengths)
