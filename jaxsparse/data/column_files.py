# SPDX-License-Identifier: Apache-2.0
"""The ``[data]`` section of a run on files with named columns: ``kind = "files"``."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxsparse.data.open_files import stream_files
from jaxsparse.data.schema import ColumnSchema
from jaxsparse.data.split_files import SplitFiles
from jaxsparse.data.stream import StreamDataset


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnFiles(SplitFiles):
    """CSV (plain or gzipped) and Parquet files, streamed."""

    columns: ColumnSchema
    """Which columns are what."""

    def open(self, paths: list[str], batch_size: int, **options: Any) -> StreamDataset:
        """The dataset of some files; options as `stream_files`."""
        return stream_files(
            paths,
            self.columns,
            batch_size,
            on_bad_row=self.on_bad_row,
            shuffle_rows=self.shuffle_rows,
            **options,
        )
