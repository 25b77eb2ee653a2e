# SPDX-License-Identifier: Apache-2.0
"""Host side of `sum_levels`: who adds into whom, so that no slot adds many terms in a row.

A float32 sum of n terms taken one by one loses up to n/2 ulp: 10^5 times 0.1 comes out as 9998.557.
So items are cut into chunks of `FAN_IN` per segment. The first chunk adds into the segment's own
slot, every further one into an overflow slot; the overflow slots are items of the next level. A
slot then adds at most FAN_IN terms a level, and there are log_FAN_IN(n) levels.
"""

from __future__ import annotations

import numpy as np

FAN_IN = 16
"""Terms one slot adds per level: error grows with it, work shrinks as 1 / (FAN_IN - 1)."""


def level_sizes(num_items: int) -> tuple[int, ...]:
    """Number of items at each level, for a buffer of ``num_items``.

    >>> level_sizes(1000)
    (1000, 62, 3)
    """
    sizes = [num_items]
    while sizes[-1] >= FAN_IN:
        sizes.append(sizes[-1] // FAN_IN)
    return tuple(sizes)


def plan_levels(
    counts: np.ndarray,
    slots: np.ndarray,
    order: np.ndarray | None,
    num_items: int,
    num_segments: int,
) -> tuple[np.ndarray, ...]:
    """Destinations of every item, level by level.

    Args:
        counts: ``[G]`` items in each group; groups are contiguous once items are in ``order``.
        slots: ``[G]`` segment each group sums into, in ``[0, num_segments)``, all different.
        order: ``[sum(counts)]`` item indices grouped; None when items already are.
        num_items: length of the item buffer; items in no group add nowhere.
        num_segments: number of result slots.

    Returns:
        One int32 array a level, of `level_sizes` lengths; entries index the buffer
        ``[results | overflow of level 1 | overflow of level 2 | ...]``, its length meaning
        "nowhere".

    >>> plan_levels(np.array([2, 1]), np.array([1, 0]), None, 4, 2)
    (array([1, 1, 0, 2], dtype=int32),)
    """
    sizes = level_sizes(num_items)
    nowhere = num_segments + sum(sizes[1:])
    overflow_start = num_segments
    counts = counts.astype(np.int64)
    levels = []
    for size in sizes:
        extra = np.maximum(-(-counts // FAN_IN) - 1, 0)
        targets = np.repeat(slots, counts)
        if extra.any():
            starts = np.cumsum(counts) - counts
            chunk = (np.arange(targets.size) - np.repeat(starts, counts)) // FAN_IN
            overflow = overflow_start + np.cumsum(extra) - extra - 1
            targets = np.where(chunk == 0, targets, np.repeat(overflow, counts) + chunk)
        level = np.full(size, nowhere, np.int32)
        level[slice(targets.size) if order is None else order] = targets
        levels.append(level)
        kept = extra > 0
        counts, slots, order = extra[kept], slots[kept], None
        overflow_start += size // FAN_IN if size >= FAN_IN else 0
    return tuple(levels)
