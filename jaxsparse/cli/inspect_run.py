# SPDX-License-Identifier: Apache-2.0
"""``jaxsparse inspect``: what a run has saved; needs no device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxsparse.ckpt import CheckpointManager
from jaxsparse.cli.inspect_tiers import run_inspect_tiers
from jaxsparse.cli.run_folder import CHECKPOINTS
from jaxsparse.config import ConfigError


def run_inspect(run_dir: str, step: int | None, *, tiers: bool, only_json: bool) -> int:
    """Prints the saves, and what one of them holds; returns the exit code.

    Args:
        run_dir: folder of a run, or of checkpoints.
        step: of the save that is described; None is the latest.
        tiers: describe where the rows of its row store lay instead.
        only_json: print the JSON line only.
    """
    manager = _manager(run_dir)
    steps = manager.steps()
    if not steps:
        raise ConfigError(f"{run_dir}: has no checkpoint")
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise ConfigError(f"{run_dir}: no save at step {chosen}; there are {steps}")
    if tiers:
        return run_inspect_tiers(run_dir, manager, chosen, only_json=only_json)
    saves = {number: manager.manifest(number) for number in steps}
    manifest = saves[chosen]
    if not only_json:
        for number, save in saves.items():
            print(f"step {number:>9,}  {save['bytes']:>15,} bytes  {_metrics_text(save)}")
        print(f"\nstep {chosen:,}:")
        width = max(map(len, manifest["leaves"]))
        for name, (shape, dtype, *_) in manifest["leaves"].items():
            print(f"  {name:{width}}  {dtype}{shape}")
    result = {
        "step": chosen,
        "steps": steps,
        "path": str(manager.path(chosen)),
        "bytes": manifest["bytes"],
        "metrics": manifest["metrics"],
        "tables": manifest["tables"],
        "leaves": {name: leaf[:2] for name, leaf in manifest["leaves"].items()},
    }
    print(json.dumps(result), flush=True)
    return 0


def _manager(run_dir: str) -> CheckpointManager:
    inner = Path(run_dir, CHECKPOINTS)
    return CheckpointManager(inner if inner.is_dir() else run_dir)


def _metrics_text(save: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value:.6g}" for name, value in save["metrics"].items())
