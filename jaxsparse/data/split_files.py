# SPDX-License-Identifier: Apache-2.0
"""What the ``[data]`` sections of runs on files have in common."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any

from jaxsparse.data.bad_rows import OnBadRow, check_on_bad_row
from jaxsparse.data.stream import SHUFFLE_ROWS, StreamDataset

Patterns = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitFiles(ABC):
    """Files of the splits, streamed."""

    dir: str = "."
    """Folder or URL of the files; relative to the current folder."""

    train: Patterns
    """Files or patterns trained on."""

    valid: Patterns = ()
    """Evaluated during training; what ``train.keep_best`` chooses by."""

    test: Patterns = ()
    """Evaluated once at the end; without it ``valid`` is."""

    on_bad_row: OnBadRow = "error"
    """``error``, or ``skip``, which counts and leaves out; then files are read twice."""

    shuffle_rows: int = SHUFFLE_ROWS
    """Rows held in memory and mixed, whatever the files' size; blocks come in any order before. As
    many as there are mix all of them."""

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

    @abstractmethod
    def open(self, paths: list[str], batch_size: int, **options: Any) -> StreamDataset:
        """The dataset of some files; options as `stream_files`."""

    def stream(self, split: str, batch_size: int, **options: Any) -> StreamDataset | None:
        """The dataset of a split, None where it names no files."""
        paths = self.paths(split)
        return self.open(paths, batch_size, **options) if paths else None
