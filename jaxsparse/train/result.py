# SPDX-License-Identifier: Apache-2.0
"""What `Trainer.fit` returns, and the picture of it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxsparse.train.report import History
from jaxsparse.train.state import TrainState

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = (("loss", "loss"), ("auc", "AUC"), ("samples_per_s_p50", "samples / s (median step)"))


@dataclasses.dataclass(frozen=True, repr=False)
class FitResult:
    """What `Trainer.fit` returns."""

    state: TrainState
    """The state after the last step."""
    history: History
    """Rows in order, of the whole run where it was resumed; ``kind`` is ``"train"`` or
    ``"eval"``."""
    interrupted: bool = False
    """Whether SIGTERM ended it; it was saved where it stopped."""

    def __repr__(self) -> str:
        """Step and last numbers: a state may hold gigabytes."""
        last: dict[str, Any] = {}
        for row in self.history:
            last |= {f"{row['kind']} {name}": row[name] for name in ("loss", "auc") if name in row}
        told = "".join(f", {name} {value:.4f}" for name, value in last.items())
        end = ", interrupted" if self.interrupted else ""
        rows = "1 row" if len(self.history) == 1 else f"{len(self.history)} rows"
        return f"FitResult(step {int(self.state.step)}, {rows} of history{told}{end})"

    @property
    def samples_per_s(self) -> float:
        """Samples a second at the median step: compiling and saving do not count; nan without
        steps."""
        return self._median("samples_per_s_p50")

    @property
    def input_wait(self) -> float:
        """Share of the time that input was waited for, the median of the rows; nan without."""
        return self._median("input_wait")

    def _median(self, name: str) -> float:
        values = [row[name] for row in self.history if row["kind"] == "train"]
        return statistics.median(values) if values else math.nan

    def plot(
        self,
        path: str | Path | None = None,
        *,
        final: Mapping[str, Any] | None = None,
        best_auc: float | None = None,
    ) -> Figure:
        """Draws loss, AUC and speed over steps.

        Args:
            path: where to save the picture as well (the ending chooses the format).
            final: metrics of the state the run is judged by, with ``step`` and ``split``: drawn
                as one more point.
            best_auc: AUC of the true probabilities, drawn as a line.

        Returns:
            The matplotlib figure, for a notebook to show.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 3.4), layout="constrained")
        for axis, (name, title) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
            self._draw(axis, name)
            if final is not None and name in final:
                label = str(final["split"])
                axis.plot(final["step"], final[name], "*", ms=11, color="C2", label=label)
            if name == "auc" and best_auc is not None:
                axis.axhline(best_auc, ls=":", color="0.4", label="best reachable")
            axis.set(title=title, xlabel="step")
            axis.xaxis.get_major_locator().set_params(integer=True)
            if name == "samples_per_s_p50":
                axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend(frameon=False)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure

    def _draw(self, axis: Axes, name: str) -> None:
        for kind, style in (("train", "-"), ("eval", "o--")):
            rows = [row for row in self.history if row["kind"] == kind and name in row]
            if rows:
                # One row alone would be no line.
                style = "o-" if len(rows) == 1 else style
                steps = [row["step"] for row in rows]
                axis.plot(steps, [row[name] for row in rows], style, ms=4, label=kind)
