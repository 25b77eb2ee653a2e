# SPDX-License-Identifier: Apache-2.0
"""Shapes and distributions that sums by group are tested and timed with."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupCase:
    """One call of `bag_gradients`: sizes, how entries fall into groups, what they weigh."""

    parts: tuple[int, ...] = (40,)
    """Bags of each array of gradients."""
    dim: int = 16
    """D."""
    num_groups: int = 30
    """K; a few groups at the end are always empty."""
    num_entries: int = 200
    """Entries in groups; M is an eighth more."""
    groups: Literal["uniform", "zipf", "one", "distinct"] = "uniform"
    """Which group each entry is of."""
    wild: bool = False
    """Whether indices far outside their range occur."""
    weighted: bool = False
    scaled: bool = False

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        """Arguments by name, as `bag_gradients_reference` takes them."""
        rng = np.random.default_rng(seed)
        num_bags = sum(self.parts)
        size = self.num_entries + self.num_entries // 8
        bags = rng.integers(0, num_bags, size).astype(np.int32)
        ids = rng.permutation(size).astype(np.int32)
        if self.wild:
            far = np.array([-1, -(2**31), num_bags, 2**31 - 1])
            bags[rng.integers(0, size, size // 3)] = rng.choice(far, size // 3)
            ids[rng.integers(0, size, size // 3)] = rng.choice(far, size // 3)
        return {
            "grads": tuple(
                rng.normal(size=(part, self.dim)).astype(np.float32) for part in self.parts
            ),
            "offsets": self._offsets(rng),
            "bags": bags,
            "ids": ids if self.weighted else None,
            "weights": rng.normal(size=size).astype(np.float32) if self.weighted else None,
            "scale": rng.random(num_bags, np.float32) if self.scaled else None,
        }

    def _offsets(self, rng: np.random.Generator) -> npt.NDArray[np.int32]:
        used = max(self.num_groups - 3, 1)
        group = rng.integers(0, used, self.num_entries)
        if self.groups == "zipf":
            group = np.minimum(rng.zipf(1.2, self.num_entries) - 1, used - 1)
        elif self.groups == "one":
            group = np.full(self.num_entries, used // 2)
        elif self.groups == "distinct":
            group = np.arange(self.num_entries) % used
        counts = np.bincount(group, minlength=self.num_groups)
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


CASES: dict[str, GroupCase] = {
    "uniform": GroupCase(),
    "scaled": GroupCase(scaled=True, dim=7, parts=(8, 24, 8)),
    "weighted": GroupCase(weighted=True, scaled=True, dim=64, parts=(20, 20)),
    "zipf": GroupCase(groups="zipf", num_entries=5000, dim=33, parts=(500, 0, 1000)),
    "one_group": GroupCase(groups="one", num_entries=9000, dim=5, parts=(100,), scaled=True),
    "weighted_group": GroupCase(groups="one", num_entries=4097, dim=3, weighted=True),
    "distinct": GroupCase(groups="distinct", num_groups=203, num_entries=200, dim=1),
    "no_entries": GroupCase(num_entries=0, dim=2),
    "wild": GroupCase(wild=True, weighted=True, scaled=True, dim=130),
    "one_row_of_1024": GroupCase(parts=(1,), dim=1024, num_entries=20),
}
"""Small ones, for tests."""


TIMED: dict[str, GroupCase] = {
    f"{groups}, dim {dim}": GroupCase(
        parts=(4096,) * 26,
        dim=dim,
        num_groups=106_500,
        num_entries=26 * 4096,
        groups=groups,
    )
    for groups in ("distinct", "zipf", "one")
    for dim in (16, 64)
}
"""Large ones, for benchmarks: as many entries as batch 4096 has ids of 26 features."""
