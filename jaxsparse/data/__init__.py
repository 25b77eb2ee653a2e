# SPDX-License-Identifier: Apache-2.0
"""Batches, and where they come from: arrays, files small and large, a generated click log."""

from jaxsparse.data.arrays import ArrayDataset, from_arrays
from jaxsparse.data.bad_rows import BadRows, OnBadRow
from jaxsparse.data.batch import Batch
from jaxsparse.data.column_files import ColumnFiles
from jaxsparse.data.criteo_files import CriteoFiles
from jaxsparse.data.files import from_files, read_files
from jaxsparse.data.open_files import stream_criteo, stream_files
from jaxsparse.data.prefetch import Prefetcher
from jaxsparse.data.schema import ColumnSchema, DataError, FeatureColumn
from jaxsparse.data.share import BatchShare
from jaxsparse.data.split_files import SplitFiles
from jaxsparse.data.stream import StreamDataset
from jaxsparse.data.synthetic import (
    SyntheticConfig,
    SyntheticField,
    synthetic_click_log,
)

__all__ = [
    "ArrayDataset",
    "BadRows",
    "Batch",
    "BatchShare",
    "ColumnFiles",
    "ColumnSchema",
    "CriteoFiles",
    "DataError",
    "FeatureColumn",
    "OnBadRow",
    "Prefetcher",
    "SplitFiles",
    "StreamDataset",
    "SyntheticConfig",
    "SyntheticField",
    "from_arrays",
    "from_files",
    "read_files",
    "stream_criteo",
    "stream_files",
    "synthetic_click_log",
]
