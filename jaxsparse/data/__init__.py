# SPDX-License-Identifier: Apache-2.0
"""Batches, and where they come from: arrays, data frames, files, a generated click log."""

from jaxsparse.data.arrays import ArrayDataset, from_arrays
from jaxsparse.data.batch import Batch
from jaxsparse.data.synthetic import (
    SyntheticConfig,
    SyntheticField,
    synthetic_click_log,
)

__all__ = [
    "ArrayDataset",
    "Batch",
    "SyntheticConfig",
    "SyntheticField",
    "from_arrays",
    "synthetic_click_log",
]
