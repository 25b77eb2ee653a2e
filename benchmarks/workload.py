# SPDX-License-Identifier: Apache-2.0
"""What is timed, and the ids it is timed on: the same arrays for this project and for its peers.

Needs numpy alone, so that a peer's environment can import it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

NUM_DENSE = 13
"""Dense features of the DLRM."""
BOTTOM = (512, 256)
"""Widths of its bottom MLP; a last layer as wide as the embeddings follows."""
TOP = (512, 256)
"""Widths of its top MLP; the layer of one logit follows."""
RATE = 0.01
"""Learning rate of all rules."""

MOST_IDS = 1 << 22
"""Ids kept for all batches together, 32 MiB of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step: tables, a batch, how its ids are spread."""

    part: Literal["sparse", "dlrm"] = "sparse"
    """``sparse``: lookup, and update by gradients of one; ``dlrm``: a whole step."""
    rule: Literal["adagrad", "rowwise_adagrad"] = "adagrad"
    tables: int = 26
    rows: int = 100_000
    """Of each table."""
    dim: int = 64
    """D."""
    batch: int = 4096
    """B, samples."""
    bag: int = 1
    """L, ids in each bag; bags are summed."""
    ids: Literal["zipf", "uniform", "distinct", "equal"] = "zipf"
    """``distinct`` and ``equal`` within a batch and a table."""
    zipf: float = 1.2
    """Exponent of ``zipf``."""
    id_rows: int | None = None
    """Ids are drawn below this; None: of all rows."""
    waits: bool = False
    """Whether each step is waited for before the next batch is touched."""
    num_batches: int = 8
    """Batches that take turns; fewer where they are large."""

    @property
    def num_ids(self) -> int:
        """N, ids of a batch over all tables."""
        return self.tables * self.batch * self.bag

    def plain(self) -> Workload:
        """The same, in the one way in which it is written."""
        return dataclasses.replace(self, id_rows=None) if self.id_rows == self.rows else self

    def draw(self, seed: int = 0) -> list[npt.NDArray[np.int64]]:
        """Ids of each batch, ``[tables, B, L]`` int64."""
        rng = np.random.default_rng(seed)
        count = max(1, min(self.num_batches, MOST_IDS // self.num_ids))
        return [self._batch(rng) for _ in range(count)]

    def dense(self, seed: int = 0) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Dense features ``[B, 13]`` and labels ``[B]``, a quarter of them 1."""
        rng = np.random.default_rng(seed)
        values = rng.standard_normal((self.batch, NUM_DENSE), np.float32)
        return values, (rng.random(self.batch) < 0.25).astype(np.float32)

    def _batch(self, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        shape = (self.tables, self.batch, self.bag)
        limit = self.id_rows or self.rows
        if self.ids == "zipf":
            return rng.zipf(self.zipf, shape).astype(np.int64) % limit
        if self.ids == "uniform":
            return rng.integers(0, limit, shape)
        if self.ids == "equal":
            return np.full(shape, rng.integers(limit))
        return np.stack(
            [rng.permutation(limit)[: shape[1] * shape[2]] for _ in range(self.tables)]
        ).reshape(shape)

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return dataclasses.asdict(self)


def distinct_rows(batches: list[npt.NDArray[np.int64]]) -> int:
    """Distinct rows of a batch over all tables, the mean of batches."""
    counts = [sum(np.unique(table).size for table in batch) for batch in batches]
    return round(float(np.mean(counts)))


def bytes_moved(workload: Workload, distinct: int) -> int:
    """The least bytes a sparse step moves.

    Activations are written and their gradients read; every distinct row is read and written, and
    so is its accumulator, which is a row for exact Adagrad and one number for the row-wise rule.
    """
    row = workload.dim * 4
    accumulator = row if workload.rule == "adagrad" else 4
    activations = workload.tables * workload.batch * row
    return 2 * activations + 2 * distinct * (row + accumulator)


def state_bytes(workload: Workload) -> int:
    """Weights and slots, without padding."""
    slots = workload.dim if workload.rule == "adagrad" else 1
    return workload.tables * workload.rows * (workload.dim + slots) * 4
