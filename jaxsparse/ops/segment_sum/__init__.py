# SPDX-License-Identifier: Apache-2.0
"""Sums of rows by segment, accurate for hot segments and in an order the run does not change."""

from jaxsparse.ops.segment_sum.levels import FAN_IN, level_sizes, plan_levels
from jaxsparse.ops.segment_sum.xla import segment_sum

__all__ = ["FAN_IN", "level_sizes", "plan_levels", "segment_sum"]
