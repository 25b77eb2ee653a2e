# SPDX-License-Identifier: Apache-2.0
"""The truth behind the generated click log: hidden levels, their products, soft thresholds.

Every key of every field has a hidden *level* in [0, 1); a bag has the mean of its keys' levels.
The logit of a click adds up

* for each field of single keys: ``level > 1/2``, a hard threshold;
* for each bag: a soft threshold of its mean level;
* for each product named: a soft threshold of the product of two or three levels, at its median;
* for each dense column: a soft threshold of its value,

and is then scaled to the standard deviation and mean that are asked for. Soft thresholds are
straight ramps from 0 to 1: hard ones in continuous values cost a small network more rows than
one pass over a million has.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float32s = npt.NDArray[np.float32]

BAG_RAMP = 0.6
"""Width of a bag's soft threshold, in levels."""

DENSE_RAMP = 3.0
"""Width of a dense column's soft threshold, in standard deviations."""

_EMPTY_BAG_LEVEL = 0.5
_GOLDEN_RATIO = 0.6180339887498949


def ramp(values: Float32s, middle: float, width: float) -> Float32s:
    """Soft threshold: 0 below ``middle - width / 2``, 1 above ``middle + width / 2``.

    >>> ramp(np.array([0.0, 0.5, 0.625, 1.0], np.float32), 0.5, 0.5)
    array([0.  , 0.5 , 0.75, 1.  ], dtype=float32)
    """
    scaled = (values - np.float32(middle)) / np.float32(width) + np.float32(0.5)
    clipped: Float32s = np.clip(scaled, np.float32(0), np.float32(1))
    return clipped


def spread_levels(size: int, offset: float) -> Float32s:
    """Levels [size] float32 in [0, 1) of the keys in order of frequency.

    Multiples of the golden ratio spread evenly over any run of ranks, so that the few heavy keys
    never decide the truth by chance, whatever the seed.
    """
    return ((np.arange(1, size + 1) * _GOLDEN_RATIO + offset) % 1).astype(np.float32)


def bag_levels(levels: Float32s, lengths: Array) -> Float32s:
    """Mean level of each bag [B] from the levels of its keys [N]; 1/2 for an empty bag.

    >>> bag_levels(np.array([0.25, 0.75, 1.0], np.float32), np.array([2, 0, 1]))
    array([0.5, 0.5, 1. ], dtype=float32)
    """
    ends = np.cumsum(lengths)
    sums = np.concatenate([[0.0], np.cumsum(levels, dtype=np.float64)])
    means = (sums[ends] - sums[ends - lengths]) / np.maximum(lengths, 1)
    return np.where(lengths > 0, means, _EMPTY_BAG_LEVEL).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of the logit before it is scaled."""

    weights: tuple[float, ...]
    """Weight of each field's own threshold, [F]."""

    is_bag: tuple[bool, ...]
    """Whether each field is of bags, [F]."""

    products: tuple[tuple[int, ...], ...]
    """Fields whose levels are multiplied, by position."""

    product_weight: float
    """Weight of each product's threshold."""

    dense_thresholds: tuple[float, ...]
    """Middle of each dense column's threshold, [d]."""

    dense_weight: float
    """Weight of each dense column's threshold."""

    def logit(self, levels: list[Float32s], dense: Float32s) -> Float32s:
        """Unscaled logit [n] float32 from levels, F of [n], and dense [n, d]."""
        total = np.zeros(len(dense), np.float32)
        for level, weight, is_bag in zip(levels, self.weights, self.is_bag, strict=True):
            passed = ramp(level, 0.5, BAG_RAMP) if is_bag else (level > 0.5).astype(np.float32)
            total += np.float32(weight) * passed
        for fields in self.products:
            product = np.prod([levels[field] for field in fields], axis=0, dtype=np.float32)
            passed = ramp(product, product_median(len(fields)), 1.2 / 2 ** len(fields))
            total += np.float32(self.product_weight) * passed
        for column, threshold in enumerate(self.dense_thresholds):
            total += np.float32(self.dense_weight) * ramp(dense[:, column], threshold, DENSE_RAMP)
        return total


def product_median(count: int) -> float:
    """Median of the product of ``count`` uniform values, within 2 % (minus log is a Gamma)."""
    return float(np.exp(1 / 3 - count)) if count > 1 else 0.5
