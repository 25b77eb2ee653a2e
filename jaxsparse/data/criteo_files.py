# SPDX-License-Identifier: Apache-2.0
"""The ``[data]`` section of a run on Criteo's format: ``kind = "criteo"``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from jaxsparse.data.bad_rows import OnBadRow, check_on_bad_row
from jaxsparse.data.criteo import CATEGORIES, INTEGERS, Categories
from jaxsparse.data.open_files import stream_criteo
from jaxsparse.data.stream import SHUFFLE_ROWS, StreamDataset

Patterns = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriteoFiles:
    """Text files in Criteo's format, plain or gzipped, streamed."""

    feature_names: ClassVar[tuple[str, ...]] = CATEGORIES
    num_dense: ClassVar[int] = len(INTEGERS)

    dir: str = "."
    """Folder or URL of the files; relative to the current folder."""

    train: Patterns
    """Files or patterns trained on."""

    valid: Patterns = ()
    """Evaluated during training."""

    test: Patterns = ()
    """Evaluated once at the end; without it ``valid`` is."""

    categories: Categories = "hex"
    """``hex``: keys are the numbers; ``string``: their text. For hashed tables both."""

    header: bool = False
    """Whether each file begins with a line to be left out."""

    on_bad_row: OnBadRow = "error"
    """``error``, or ``skip``, which counts and leaves out; then text is read twice."""

    shuffle_rows: int = SHUFFLE_ROWS
    """Rows held in memory and mixed; blocks of lines come in any order before."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        check_on_bad_row(self.on_bad_row)
        if self.shuffle_rows < 1:
            raise ValueError(f"shuffle_rows must be >= 1, got {self.shuffle_rows}")

    def paths(self, split: str) -> list[str]:
        """Paths, patterns or URLs of ``train``, ``valid`` or ``test``, possibly none."""
        given = getattr(self, split)
        names = [given] if isinstance(given, str) else list(given)
        return [
            name if name.startswith("/") or "://" in name else f"{self.dir}/{name}"
            for name in names
        ]

    def stream(self, split: str, batch_size: int, **options: Any) -> StreamDataset | None:
        """The dataset of a split, None where it names no files; options as `stream_files`."""
        paths = self.paths(split)
        return self.open(paths, batch_size, **options) if paths else None

    def open(self, paths: Sequence[str], batch_size: int, **options: Any) -> StreamDataset:
        """The dataset of files that need not be the run's."""
        return stream_criteo(
            paths,
            batch_size,
            categories=self.categories,
            header=self.header,
            on_bad_row=self.on_bad_row,
            shuffle_rows=self.shuffle_rows,
            **options,
        )
