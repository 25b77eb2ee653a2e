# SPDX-License-Identifier: Apache-2.0
"""Shapes and distributions that `embedding_bag` is tested and timed with."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True, kw_only=True)
class BagCase:
    """One call: sizes, how ids are drawn, and which arguments there are."""

    num_rows: int = 97
    """R."""
    dim: int = 16
    """D."""
    parts: tuple[int, ...] = (24,)
    """Bags of each result."""
    lengths: Literal["one", "ragged", "hot", "empty"] = "one"
    """``one`` passes no offsets; ``hot`` gives one bag most of the ids."""
    ids: Literal["uniform", "zipf", "wild"] = "uniform"
    """``wild`` has indices far outside their range too."""
    through_rows: bool = True
    """Whether slots go through an array of distinct rows."""
    weighted: bool = False
    scaled: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    num_ids: int = 200
    """Ids of a call that is not ``one``; one in eight of them is padding after the last bag."""

    def arguments(self, seed: int = 0) -> dict[str, npt.NDArray[Any] | None]:
        """Arguments by name, as `embedding_bag_reference` takes them."""
        rng = np.random.default_rng(seed)
        num_bags = sum(self.parts)
        num_ids = num_bags if self.lengths == "one" else self.num_ids
        table = rng.normal(size=(self.num_rows, self.dim)).astype(np.float32)
        rows, slots = self._addresses(rng, num_ids)
        return {
            "table": table.astype(ml_dtypes.bfloat16) if self.dtype == "bfloat16" else table,
            "rows": rows,
            "slots": slots,
            "offsets": self._offsets(rng, num_bags),
            "weights": rng.normal(size=num_ids).astype(np.float32) if self.weighted else None,
            "scale": rng.random(num_bags, np.float32) if self.scaled else None,
        }

    def _addresses(
        self, rng: np.random.Generator, num_ids: int
    ) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.int32]]:
        wanted = rng.integers(0, self.num_rows, num_ids)
        if self.ids == "zipf":
            wanted = (rng.zipf(1.2, num_ids) - 1) % self.num_rows
        distinct, inverse = np.unique(wanted, return_inverse=True)
        rows = np.concatenate([distinct, np.full(3, self.num_rows)]).astype(np.int32)
        slots = (inverse if self.through_rows else wanted).astype(np.int32)
        if self.ids == "wild":
            far = np.array([-1, -(2**31), rows.size, self.num_rows, 2**31 - 1])
            slots[rng.integers(0, num_ids, num_ids // 3)] = rng.choice(far, num_ids // 3)
            rows[rng.integers(0, rows.size, 3)] = [-7, self.num_rows, 2**31 - 1]
        return (rows if self.through_rows else None), slots

    def _offsets(self, rng: np.random.Generator, num_bags: int) -> npt.NDArray[np.int32] | None:
        if self.lengths == "one":
            return None
        real = 0 if self.lengths == "empty" else self.num_ids - self.num_ids // 8
        share = rng.exponential(size=num_bags) * (rng.random(num_bags) < 0.7)
        if self.lengths == "hot":
            share[num_bags // 2] = 50 * num_bags
        ends = np.cumsum(share) / max(share.sum(), 1e-9) * real
        return np.concatenate([[0], np.floor(ends)]).astype(np.int32)


CASES: dict[str, BagCase] = {
    "one_id": BagCase(),
    "one_id_of_a_slab": BagCase(through_rows=False),
    "scaled": BagCase(scaled=True, dim=33),
    "ragged": BagCase(lengths="ragged", scaled=True, parts=(24, 0, 48), dim=7),
    "weighted": BagCase(lengths="ragged", weighted=True, scaled=True, parts=(9, 9), dim=64),
    "weighted_one_id": BagCase(weighted=True, dim=1),
    "zipf": BagCase(lengths="ragged", ids="zipf", num_rows=1000, num_ids=4000, dim=130),
    "hot_bag": BagCase(lengths="hot", num_ids=6000, dim=5, through_rows=False),
    "no_ids": BagCase(lengths="empty", scaled=True),
    "no_bags": BagCase(parts=(0,), dim=3),
    "wild": BagCase(lengths="ragged", ids="wild", weighted=True),
    "wild_rows_of_a_slab": BagCase(ids="wild", through_rows=False, dim=100),
    "bfloat16": BagCase(lengths="ragged", weighted=True, dtype="bfloat16", dim=37),
    "bfloat16_one_id": BagCase(dtype="bfloat16", dim=64, scaled=True),
    "one_row_of_1024": BagCase(num_rows=1, dim=1024, parts=(3,)),
}
"""Small ones, for tests."""


TIMED: dict[str, BagCase] = {
    f"{ids} dim {dim}": BagCase(
        num_rows=2_600_000, dim=dim, parts=(4096,) * 26, ids=ids, through_rows=False
    )
    for ids in ("uniform", "zipf")
    for dim in (16, 64)
} | {
    "bags of 20, zipf, dim 64": BagCase(
        num_rows=1_000_000,
        dim=64,
        parts=(4096,),
        lengths="ragged",
        ids="zipf",
        scaled=True,
        num_ids=81_920,
        through_rows=False,
    )
}
"""Large ones, for benchmarks: batch 4096, 26 features."""
