# SPDX-License-Identifier: Apache-2.0
"""What commands print: progress on stderr, a summary and one line of JSON on stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jaxsparse.cli.splits import Split
from jaxsparse.distributed import is_first
from jaxsparse.plan_text import counted
from jaxsparse.train import Trainer, TrainState
from jaxsparse.train.report import json_safe


def tell(text: str) -> None:
    """Prints to stderr, at once; in a job, process 0 does."""
    if is_first():
        print(text, file=sys.stderr, flush=True)


def final_metrics(trainer: Trainer, state: TrainState, split: Split) -> dict[str, Any]:
    """Metrics of a state on a split, beside the best reachable AUC where it is known."""
    metrics = trainer.evaluate(state, split.dataset)
    result = {"step": int(state.step), "split": split.name, **metrics}
    if split.skips:
        result["skipped_rows"] = skipped_rows(split)
    if split.best_auc is not None:
        result["best_auc"] = split.best_auc
    return result


def skipped_rows(*splits: Split | None) -> dict[str, dict[str, int]]:
    """Rows that were left out, by split and reason, the most frequent reason first."""
    return {split.name: dict(split.bad_rows.counts.most_common()) for split in splits if split}


def tell_skipped(split: Split) -> None:
    """Tells which rows of a split are left out, with the first of each kind."""
    for reason, told in split.bad_rows.report().items():
        tell(f"{split.name}: {told['rows']:,} rows skipped, {reason}; first: {told['example']}")


def print_result(result: dict[str, Any], folder: Path, only_json: bool) -> None:
    """Prints a summary for people, and as the last line a JSON object."""
    if not is_first():
        return
    if not only_json:
        print(describe(result, folder))
    print_json(result, folder)


def print_json(result: dict[str, Any], folder: Path) -> None:
    """Prints the last line, one JSON object."""
    print(json.dumps(json_safe({**result, "run_dir": str(folder)})), flush=True)


def describe(result: dict[str, Any], folder: Path) -> str:
    """The summary.

    >>> result = {"step": 512, "split": "test", "num_samples": 1000, "auc": 0.8321,
    ...           "logloss": 0.41, "ne": 0.8, "calibration": 1.01, "best_auc": 0.84}
    >>> print(describe(result, Path("runs/a")))
    after 512 steps, on 1,000 samples of test (runs/a):
      logloss .4100   NE .8000   calibration 1.010
      best reachable AUC .8400   reached .8321
    """
    num_samples = f"{result['num_samples']:,}"
    lines = [
        f"after {counted(result['step'], 'step')}, on {num_samples} samples of {result['split']} "
        f"({folder}):"
    ]
    skipped = [
        f"  skipped of {split}: {', '.join(f'{rows:,} ({why})' for why, rows in reasons.items())}"
        for split, reasons in result.get("skipped_rows", {}).items()
        if reasons
    ]
    if "auc" not in result:
        return "\n".join([*lines, f"  loss {result['loss']:.6g}", *skipped])
    speed = ""
    if "samples_per_s" in result:
        speed = f"   samples/s {result['samples_per_s']:,.0f}"
    lines.append(
        f"  logloss {_short(result['logloss'])}   NE {_short(result['ne'])}   "
        f"calibration {result['calibration']:.3f}{speed}"
    )
    if "best_auc" in result:
        best, reached = _short(result["best_auc"]), _short(result["auc"])
        lines.append(f"  best reachable AUC {best}   reached {reached}")
    else:
        lines.append(f"  AUC {_short(result['auc'])}")
    return "\n".join([*lines, *skipped])


def _short(value: float) -> str:
    text = f"{value:.4f}"
    return text.removeprefix("0") if text.startswith("0.") else text
