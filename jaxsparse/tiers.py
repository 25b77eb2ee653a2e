# SPDX-License-Identifier: Apache-2.0
"""`Tiers`: how many of a table's rows lie on the devices, in the host's memory and on disks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from jaxsparse.dynamic import check_int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiers:
    """Where the rows of a table may lie; a `jaxsparse.RowStore` moves them.

    >>> Tiers(device_rows=1000, ssd="/data/rows").ssd
    ('/data/rows',)
    """

    device_rows: int
    """Rows on the devices of the mesh together. The rows of a batch have to fit; a pass of
    several batches is cut to fit."""

    host_rows: int | None = None
    """Rows in the memory of the hosts together; None is no limit. Needs ``ssd`` where it is set:
    rows that fit neither on the devices nor here go there."""

    ssd: Sequence[str | os.PathLike[str]] = ()
    """Folders on disks, over which rows are spread; empty for none. Where several processes share
    the table, each has a folder of its own in them, such as ``process-0``."""

    def __post_init__(self) -> None:
        """Validates and normalises the fields."""
        check_int("Tiers", "device_rows", self.device_rows, 1)
        if self.host_rows is not None:
            check_int("Tiers", "host_rows", self.host_rows, 0)
        folders = self.ssd
        if isinstance(folders, str | os.PathLike):
            folders = (folders,)
        try:
            object.__setattr__(self, "ssd", tuple(str(Path(folder)) for folder in folders))
        except TypeError as error:
            raise TypeError(
                f"Tiers: ssd must be a list of folders, got {self.ssd!r}: {error}"
            ) from error
        if len(set(self.ssd)) != len(self.ssd):
            raise ValueError(f"Tiers: ssd must name each folder once, got {self.ssd}")
        if self.host_rows is not None and not self.ssd:
            raise ValueError(
                f"Tiers: host_rows={self.host_rows} needs ssd=[folders] for the rows beyond it; "
                "without disks leave host_rows at None"
            )
