# SPDX-License-Identifier: Apache-2.0
"""Rows of a run's history as TensorBoard events."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter


class EventFile:
    """Writes each number of a row as the scalar ``train/<name>`` or ``eval/<name>`` of its step.

    Those of its ``tables`` have the table's name between."""

    def __init__(self, folder: Path, next_step: int | None) -> None:
        """Opens a new file in the folder.

        Args:
            folder: of the run; TensorBoard reads all event files in it together.
            next_step: first step of a run that is taken up: what was written from there on is
                left out by readers. None: a new run.
        """
        self._writer = SummaryWriter(str(folder), purge_step=next_step)

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds a row; it is on the disk when this returns."""
        tables = {f"tables/{name}": told for name, told in row.get("tables", {}).items()}
        for part, values in {"": row, **tables}.items():
            where = f"{row['kind']}/{part}/" if part else f"{row['kind']}/"
            for name, value in values.items():
                if name in ("kind", "step") or not isinstance(value, int | float):
                    continue
                if math.isfinite(value):
                    self._writer.add_scalar(where + name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()
