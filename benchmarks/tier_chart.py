# SPDX-License-Identifier: Apache-2.0
"""A chart of samples a second against rows over device rows."""

from __future__ import annotations

import pathlib

from matplotlib.figure import Figure

from benchmarks.charts import OURS, PEER
from benchmarks.report import Result

COLORS = {"ram": OURS, "ssd, cached": PEER}
LABELS = {
    "ram": "the others in memory",
    "ssd, cached": "some in memory, the others on a disk, cached",
}


def draw_tiers(result: Result, path: pathlib.Path) -> None:
    """A line for each kind of set-up, as PNG."""
    curve = result["curve"]
    figure = Figure(figsize=(6.4, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    base = next(point["samples_per_s"] for point in curve["points"] if point["setup"] == "device")
    axes.axhline(base, color="#8a8a8a", linestyle="--", linewidth=1.2, label="all on the device")
    for setup, color in COLORS.items():
        points = [point for point in curve["points"] if point["setup"] == setup]
        ratios = [point["rows_per_device_row"] for point in points]
        rates = [point["samples_per_s"] for point in points]
        axes.plot(ratios, rates, "o-", color=color, label=LABELS[setup], markersize=4.5)
        axes.set_xscale("log")
        axes.set_xticks(ratios, [f"{ratio:.0f}" for ratio in ratios])
    axes.minorticks_off()
    axes.set_ylim(0, 1.15 * base)
    axes.set_xlabel("rows over device rows")
    axes.set_ylabel("samples a second")
    on = result["machine"]
    axes.set_title(
        f"{on['cpu']}, {on['cores']} cores; {curve['rows']:,} rows", fontsize=10, loc="left"
    )
    axes.grid(True, color="#e5e5e5", linewidth=0.7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path)
