# SPDX-License-Identifier: Apache-2.0
"""``jaxsparse inspect --tiers``: where the rows of a run's row store lay at a save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxsparse.ckpt import CheckpointManager
from jaxsparse.ckpt.stored import saved_census
from jaxsparse.cli.run_folder import METRICS
from jaxsparse.cli.tell import tell
from jaxsparse.config import ConfigError
from jaxsparse.plan_text import align
from jaxsparse.store.census import PERCENTILES, draw_tiers
from jaxsparse.store.tier_clock import TIERS

PICTURE = "tiers.png"
RATES = ("hit_rate", "insert_rate", "admission_rate", "eviction_rate")


def run_inspect_tiers(
    run_dir: str, manager: CheckpointManager, step: int, *, only_json: bool
) -> int:
    """Prints rows and hotness by tier, and draws them into the run's folder; returns the exit code.

    Args:
        run_dir: folder of the run.
        manager: of its saves.
        step: of the save.
        only_json: print the JSON line only.

    Raises:
        ConfigError: the run has no table with a row store.
    """
    tables = saved_census(manager.path(step), manager.manifest(step))
    if not tables:
        raise ConfigError(
            f"{run_dir}: no table has dynamic keys or tiers, all rows are on the devices"
        )
    history = _history(Path(run_dir, METRICS), step)
    told = {name: {"rows": census.keys.size, **census.summary()} for name, census in tables.items()}
    last: dict[str, Any] = next((row["tables"] for row in reversed(history) if "tables" in row), {})
    for name, rates in last.items():
        told[name] |= {rate: rates[rate] for rate in RATES}
    if not only_json:
        print(f"step {step:,}\n\n" + "\n".join(_lines(told)))
    picture = Path(run_dir, PICTURE)
    try:
        draw_tiers(tables, history).savefig(picture, dpi=120)
    except OSError as error:  # such as a run that others have made
        tell(f"no picture: {error}")
    print(json.dumps({"step": step, "tables": told, "picture": str(picture)}), flush=True)
    return 0


def _history(path: Path, step: int) -> list[dict[str, Any]]:
    """Rows of training up to a step."""
    if not path.is_file():
        return []
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row["kind"] == "train" and row["step"] <= step]


def _lines(told: dict[str, Any]) -> list[str]:
    heads = ("table", "tier", "rows", "of occurrences", *(f"hotness p{p}" for p in PERCENTILES))
    rows: list[tuple[str, ...]] = [heads]
    for name, table in told.items():
        for tier in TIERS:
            part = table[tier]
            values = [f"{part[f'p{p}']:.3g}" if part["rows"] else "-" for p in PERCENTILES]
            rows.append((name, tier, f"{part['rows']:,}", f"{part['occurrences']:.1%}", *values))
    lines = align(rows, left=(0, 1))
    for name, table in told.items():
        if RATES[0] in table:
            rates = "  ".join(f"{r.removesuffix('_rate')} {table[r]:.1%}" for r in RATES)
            lines.append(f"{name}, the last steps: {rates}")
    return lines
