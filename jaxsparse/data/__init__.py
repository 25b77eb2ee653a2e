# SPDX-License-Identifier: Apache-2.0
"""Batches, and where they come from: arrays, data frames, files, a generated click log."""

from jaxsparse.data.batch import Batch
from jaxsparse.data.synthetic import (
    SyntheticConfig,
    SyntheticField,
    synthetic_click_log,
)

__all__ = ["Batch", "SyntheticConfig", "SyntheticField", "synthetic_click_log"]
