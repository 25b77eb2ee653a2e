# SPDX-License-Identifier: Apache-2.0
"""Charts of time against size, ours and the peer's, both axes logarithmic."""

from __future__ import annotations

import pathlib
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.report import Result

OURS, PEER, FLOOR = "#1f6feb", "#d1495b", "#8a8a8a"
COLUMNS = 4
TICKS = [digit * 10.0**power for power in range(-4, 6) for digit in (1, 2, 5)]


def _short(value: float, _: Any = None) -> str:
    """1500000 as 1.5M, 65536 as 65,536."""
    for limit, sign in ((1e6, "M"), (1e3, "k")):
        if value >= limit and value % (limit / 10) == 0:
            return f"{value / limit:g}{sign}"
    return f"{value:,g}" if value < 10_000 else f"{value:,.0f}"


def _line(axes: Axes, points: list[Result], who: str, color: str, label: str) -> None:
    sizes = [point["size"] for point in points]
    lower, middle, upper = (
        [point[who][key] for point in points] for key in ("lower", "median", "upper")
    )
    axes.plot(sizes, middle, "o-", color=color, label=label, markersize=4.5)
    axes.fill_between(sizes, lower, upper, color=color, alpha=0.15, linewidth=0)


def _panel(axes: Axes, series: Result, bandwidth: float) -> None:
    points = series["points"]
    _line(axes, points, "peer", PEER, "FBGEMM, at its best thread count")
    _line(axes, points, "ours", OURS, "jaxsparse")
    sizes = [point["size"] for point in points]
    floor = [point["bytes"] / bandwidth * 1e3 for point in points]
    axes.plot(sizes, floor, "--", color=FLOOR, linewidth=1.2, label="bytes at copy bandwidth")
    if sizes[-1] >= 4 * sizes[0]:
        axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [_short(size) for size in sizes])
    axes.minorticks_off()
    times = [
        point[who][key]
        for point in points
        for who in ("ours", "peer")
        for key in ("lower", "upper")
    ]
    low, high = _decades(min(*times, *floor), max(times))
    axes.set_ylim(low, high)
    axes.set_yticks([tick for tick in TICKS if low <= tick <= high])
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(series["title"], fontsize=10, loc="left")
    axes.set_xlabel(series["axis"], fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(True, color="#e5e5e5", linewidth=0.7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _decades(low: float, high: float) -> tuple[float, float]:
    """Limits that hold both with some room, at least a factor of ten apart."""
    low, high = low / 1.3, high * 1.3
    widen = max(1.0, (10 / (high / low)) ** 0.5)
    return low / widen, high * widen


def draw_growth(result: Result, path: pathlib.Path) -> None:
    """One panel a series, as PNG."""
    series = list(result["series"].values())
    columns = min(COLUMNS, len(series))
    rows = -(-len(series) // columns)
    figure = Figure(figsize=(3.3 * columns, 2.9 * rows + 0.5), dpi=120, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, one in zip(panels, series, strict=False):
        _panel(axes, one, result["copy_bandwidth"])
    for axes in panels[len(series) :]:
        axes.set_axis_off()
    for row in range(rows):
        panels[row * columns].set_ylabel("ms per step", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    on, shape = result["machine"], result["workload"]
    figure.suptitle(
        f"Lookup, gradient sums and exact Adagrad from raw ids: {on['cpu']}, {on['cores']} cores.\n"
        f"{shape['tables']} tables × {shape['rows']:,} rows, D {shape['dim']}, batch "
        f"{shape['batch']:,}, Zipf {shape['zipf']:g} where not told; medians and quartiles",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    figure.legend(handles, labels, loc="outside upper right", ncols=3, frameon=False, fontsize=10)
    figure.savefig(path)
