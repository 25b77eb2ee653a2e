# SPDX-License-Identifier: Apache-2.0
"""A table of a row store as it was saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]

COLUMNS = {
    "keys": "uint64",
    "numbers": "int32",
    "places": "int32",
    "counts": "int32",
    "last": "int32",
    "times": "float64",
    "hotness": "float32",
}
"""Of every row beside its values; ``times`` only where something depends on them."""

DEFAULT = "default."
"""Before the names of the arrays of the default row."""


class SavedTable(Protocol):
    """A table that was saved, as `RowStore.refill` takes it in."""

    num_rows: int
    facts: Mapping[str, Any]

    def column(self, name: str) -> Array | None:
        """A whole column of `COLUMNS` ``[n]``; None where it was not saved."""
        ...

    def extra(self, name: str) -> Array | None:
        """A whole array that is not by row; None where it was not saved."""
        ...

    def blocks(self) -> Iterator[tuple[slice, dict[str, Array]]]:
        """Values of the rows, in the order of the columns: part of them, and arrays by name."""
        ...
