# SPDX-License-Identifier: Apache-2.0
"""A log of keys drawn by Zipf's law from one bounded key space, the same for whoever asks."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from jaxsparse.fingerprint import mix64

Ranks = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZipfLog:
    """Ranks 1..``num_keys`` with p(r) proportional to r^-``exponent``, and a key for each rank."""

    num_keys: int = 20_000_000
    exponent: float = 1.05
    """Above 1."""
    seed: int = 0

    def ranks(self, number: int, size: int) -> Ranks:
        """Ranks ``[size]`` of batch ``number``.

        Source: rejection-inversion, Hörmann and Derflinger 1996: exact, without a table.
        """
        rng = np.random.default_rng([self.seed, number])
        found = self._some(rng, size)
        while found.size < size:
            found = np.concatenate([found, self._some(rng, size)])
        return found[:size]

    def _some(self, rng: np.random.Generator, tries: int) -> Ranks:
        low, high = self._area(1.5) - 1.0, self._area(self.num_keys + 0.5)
        area = low + (high - low) * rng.random(tries + tries // 16 + 16)
        near = (1 + (1 - self.exponent) * area) ** (1 / (1 - self.exponent))
        rank = np.clip(np.rint(near), 1, self.num_keys)
        # Of the area over rank +- 1/2 its upper end counts, as much as the rank's weight.
        hit = area >= self._area(rank + 0.5) - rank**-self.exponent
        return rank[hit].astype(np.int64)

    def _area(self, x: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Under r^-exponent from 1 to x."""
        return (np.asarray(x) ** (1 - self.exponent) - 1) / (1 - self.exponent)

    def distinct(self, draws: float) -> float:
        """Keys that are expected to come among so many draws, within a hundredth."""
        rank = np.unique(np.geomspace(1, self.num_keys, 20_000).astype(np.int64))
        width = np.diff(rank, append=self.num_keys + 1)
        weight = rank**-self.exponent
        share = weight / (width * weight).sum()
        return float((width * -np.expm1(-draws * share)).sum())

    def draws(self, distinct: float) -> float:
        """Draws among which so many keys are expected."""
        low, high = 0.0, float(self.num_keys)
        while self.distinct(high) < distinct:
            high *= 2
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.distinct(middle) < distinct else (low, middle)
        return high

    def keys(self, ranks: Ranks, exchanged: bool = False) -> Keys:
        """A 64-bit key for each rank; ``exchanged``: those of the other half of the ranks."""
        shift = self.num_keys // 2 if exchanged else 0
        return mix64(((ranks + shift) % self.num_keys).astype(np.uint64))
