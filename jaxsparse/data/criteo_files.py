# SPDX-License-Identifier: Apache-2.0
"""The ``[data]`` section of a run on Criteo's format: ``kind = "criteo"``."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jaxsparse.data.criteo import CATEGORIES, INTEGERS, Categories
from jaxsparse.data.open_files import stream_criteo
from jaxsparse.data.split_files import SplitFiles
from jaxsparse.data.stream import StreamDataset


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriteoFiles(SplitFiles):
    """Text files in Criteo's format, plain or gzipped, streamed."""

    feature_names: ClassVar[tuple[str, ...]] = CATEGORIES
    num_dense: ClassVar[int] = len(INTEGERS)
    dense_names: ClassVar[tuple[str, ...]] = INTEGERS

    categories: Categories = "hex"
    """``hex``: keys are the numbers; ``string``: their text. For hashed tables both."""

    header: bool = False
    """Whether each file begins with a line to be left out."""

    def open(self, paths: list[str], batch_size: int, **options: Any) -> StreamDataset:
        """The dataset of some files; options as `stream_files`."""
        return stream_criteo(
            paths,
            batch_size,
            categories=self.categories,
            header=self.header,
            on_bad_row=self.on_bad_row,
            shuffle_rows=self.shuffle_rows,
            **options,
        )
