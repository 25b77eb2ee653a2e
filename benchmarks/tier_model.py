# SPDX-License-Identifier: Apache-2.0
"""A model for the tiers' benchmark as large as its step takes a stated time on this machine."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

from benchmarks.tier_task import TierWorkload
from benchmarks.workers import tier

STEP_MS = (90.0, 110.0)
"""What a step takes with all rows on the device, for figures to quote."""
WANTED_MS = sum(STEP_MS) / 2
SIZING_ROWS = 400_000
"""Of the table while the model is sized: what a step takes hardly depends on them."""
SIZING_SHARE = 0.5
"""Second of the two shares of the model's widths at which a step is timed."""
SHARES = (0.2, 3.0)
"""Of the widths, at least and at most."""


def share_of_widths(step_ms: Callable[[float], float]) -> float:
    """Share of the model's widths at which a step takes `WANTED_MS`.

    Layers are products of two widths or of one and the data's, so time is taken for a part that no
    width changes and one in proportion to their power of 1.5.

    Args:
        step_ms: milliseconds of a step at a share of the widths.
    """
    whole = step_ms(1.0)
    if STEP_MS[0] < whole < STEP_MS[1]:
        return 1.0
    model = (whole - step_ms(SIZING_SHARE)) / (1 - SIZING_SHARE**1.5)
    if model <= 0:  # noise is larger than the model
        return 1.0
    share = max((WANTED_MS - whole + model) / model, 0.0) ** (1 / 1.5)
    return min(max(share, SHARES[0]), SHARES[1])


def with_widths(workload: TierWorkload, share: float) -> TierWorkload:
    """The workload with a model of a share of its widths, multiples of 16."""

    def scaled(widths: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(max(16, round(width * share / 16) * 16) for width in widths)

    return dataclasses.replace(workload, bottom=scaled(workload.bottom), top=scaled(workload.top))


def sized(workload: TierWorkload) -> TierWorkload:
    """With a model whose step takes `WANTED_MS` on this machine, all rows on the device."""
    small = dataclasses.replace(workload, tier="device", rows=SIZING_ROWS)

    def step_ms(share: float) -> float:
        with tier() as worker:
            worker.prepare(with_widths(small, share))
            return statistics.median(worker.run(4 * small.passes)) / small.batches_per_pass

    return with_widths(workload, share_of_widths(step_ms))
