# SPDX-License-Identifier: Apache-2.0
"""What a pass will do, decided before it begins."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxsparse.store.blocks import Block
from jaxsparse.store.residency import Moves

Codes = npt.NDArray[np.int64]


@dataclasses.dataclass
class SlabSwap:
    """What crosses the boundary of one slab."""

    index: int
    """Of the slab."""
    tables: tuple[str, ...]
    """Of the slab, in its order."""
    leaving: Block
    coming: Block
    new: Block
    new_numbers: tuple[Any, Any, Any]
    """As `make_rows` takes them; of no use where ``new`` is empty."""
    words: npt.NDArray[np.uint32] | None = None
    """``[N * K, W]`` of the rows that come, once they are read."""
    left: dict[str, jax.Array] | None = None
    """Weights and slots ``[N * K, ...]`` of the rows that left, once the pass was entered."""


@dataclasses.dataclass
class PassPlan:
    """Batches, and where their rows will lie."""

    batches: list[tuple[Any, dict[str, Codes]]]
    """As the planner was given them (`translate.Asked`), with codes by table of all entries."""
    moves: dict[str, Moves]
    """By table."""
    swaps: list[SlabSwap]
    facts: dict[str, Any]
    """For people; see `RowStore.passes`."""
