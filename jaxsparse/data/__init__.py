# SPDX-License-Identifier: Apache-2.0
"""Batches, and where they come from: arrays, data frames, files, a generated click log."""

from jaxsparse.data.arrays import ArrayDataset, from_arrays
from jaxsparse.data.batch import Batch
from jaxsparse.data.files import from_files, read_files
from jaxsparse.data.schema import ColumnSchema, DataError, FeatureColumn
from jaxsparse.data.synthetic import (
    SyntheticConfig,
    SyntheticField,
    synthetic_click_log,
)

__all__ = [
    "ArrayDataset",
    "Batch",
    "ColumnSchema",
    "DataError",
    "FeatureColumn",
    "SyntheticConfig",
    "SyntheticField",
    "from_arrays",
    "from_files",
    "read_files",
    "synthetic_click_log",
]
