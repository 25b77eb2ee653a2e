# SPDX-License-Identifier: Apache-2.0
"""Which rows of a table are hot, and in which tier each lies; and a picture of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jaxsparse.store.tier_clock import TIERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PERCENTILES = (50, 90, 99, 100)
COLORS = ("C3", "C1", "C0")
DOTS = 4000
"""Most points of a curve; ranks between are left out."""


@dataclasses.dataclass(frozen=True)
class Census:
    """The rows of one table.

    >>> census = Census(np.arange(4, dtype=np.uint64), np.float32([8, 4, 0, 1]), (1, 2, 1))
    >>> census.tier.tolist(), census.summary()["device"]["occurrences"]
    ([0, 1, 1, 2], 0.6153846153846154)
    """

    keys: npt.NDArray[np.uint64]
    """``[n]``: rows on the devices first, then those in memory, then those on disks."""
    hotness: npt.NDArray[np.float32]
    """``[n]`` occurrences; one counts half after every 20 batches."""
    tier_rows: tuple[int, int, int]
    """How many rows each tier has; further ones have no values yet."""

    @property
    def tier(self) -> npt.NDArray[np.int8]:
        """``[n]`` number of the tier in `TIERS`, and 3 behind them."""
        tiers = np.repeat(np.arange(3, dtype=np.int8), self.tier_rows)
        behind = np.full(self.keys.size - tiers.size, 3, np.int8)
        return np.concatenate([tiers, behind])

    def summary(self) -> dict[str, Any]:
        """By tier: ``rows``, the share of recent ``occurrences``, percentiles of the hotness."""
        total, tier = float(self.hotness.sum(dtype=np.float64)), self.tier
        told: dict[str, Any] = {}
        for number, name in enumerate(TIERS):
            hotness = self.hotness[tier == number]
            share = float(hotness.sum(dtype=np.float64)) / total if total else 0.0
            told[name] = {"rows": int(hotness.size), "occurrences": share}
            if hotness.size:
                values = np.percentile(hotness, PERCENTILES)
                told[name] |= {f"p{p}": float(v) for p, v in zip(PERCENTILES, values, strict=True)}
        return told


def draw_tiers(tables: Mapping[str, Census], history: Sequence[Mapping[str, Any]] = ()) -> Figure:
    """Draws by table where the hot rows lie, and below what passes have moved and waited for.

    Args:
        tables: by name.
        history: rows of a run's ``metrics.jsonl``; none for the upper part alone.
    """
    from matplotlib.figure import Figure

    passes = [row for row in history if row.get("passes")]
    columns = max(len(tables), 3 if passes else 1)
    figure = Figure(figsize=(4.2 * columns, 6.6 if passes else 3.4), layout="constrained")
    axes = figure.subplots(2 if passes else 1, columns, squeeze=False)
    for axis, (name, census) in zip(axes[0], tables.items(), strict=False):
        _draw_hotness(axis, name, census)
    axes[0][0].set_ylabel("hotness (decayed occurrences)")
    for axis in axes[0][len(tables) :]:
        axis.set_axis_off()
    if passes:
        _draw_hits(axes[1][0], passes)
        _draw_bytes(axes[1][1], passes)
        _draw_waits(axes[1][2], passes)
        for axis in axes[1][3:]:
            axis.set_axis_off()
    return figure


def _draw_hotness(axis: Axes, name: str, census: Census) -> None:
    """Hotness by rank; each tier's rows in its colour."""
    order = np.argsort(-census.hotness, kind="stable")
    hotness, tier = census.hotness[order], census.tier[order]
    rank = np.arange(1, order.size + 1)
    for number, (label, color) in reversed(list(enumerate(zip(TIERS, COLORS, strict=True)))):
        mine = np.flatnonzero(tier == number)
        if mine.size:
            # Evenly on the logarithmic axis.
            near = np.geomspace(1, mine.size, DOTS).astype(int) - 1
            shown = mine[np.unique(near)]
            text = f"{label}: {mine.size:,} rows"
            floor = np.maximum(hotness[shown], 1e-4)
            axis.plot(rank[shown], floor, ".", ms=3, color=color, label=text)
    axis.set(xscale="log", yscale="log", title=name, xlabel="rank")
    axis.legend(frameon=False, fontsize=8, markerscale=3, reverse=True)
    axis.grid(alpha=0.3)


def _draw_hits(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    steps = [row["step"] for row in rows]
    for name in rows[-1]["tables"]:
        told = [row["tables"][name]["hit_rate"] if name in row["tables"] else 0 for row in rows]
        axis.plot(steps, told, "o-", ms=3, label=name)
    _finish(axis, "occurrences on the device when planned")
    axis.set_ylim(0, 1.02)


def _draw_bytes(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    ways = {
        "host to devices": ("host_to_device_bytes", "C3", "-"),
        "devices to host": ("device_to_host_bytes", "C3", ":"),
        "disks read": ("ssd_read_bytes", "C0", "-"),
        "disks written": ("ssd_written_bytes", "C0", ":"),
    }
    steps = [row["step"] for row in rows]
    for label, (name, color, style) in ways.items():
        told = [row.get(name, 0) / row["passes"] / 1e6 for row in rows]
        axis.plot(steps, told, style, color=color, label=label)
    _finish(axis, "MB moved a pass")


def _draw_waits(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    steps = [row["step"] for row in rows]
    waits = ("data", "plan", *TIERS)
    told = {
        what: np.array([row[f"{what}_wait_ms"] / row["passes"] for row in rows]) for what in waits
    }
    told["plan"] = told["plan"] - told["data"]
    colors = ["0.8", "0.6", *COLORS]
    axis.stackplot(steps, *told.values(), labels=list(told), colors=colors)
    _finish(axis, "ms waited a pass")


def _finish(axis: Axes, title: str) -> None:
    axis.set(title=title, xlabel="step")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=8)
    axis.grid(alpha=0.3)
