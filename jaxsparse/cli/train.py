# SPDX-License-Identifier: Apache-2.0
"""``jaxsparse train``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxsparse.ckpt import save_state
from jaxsparse.cli.resolve import config_errors, make_collection, make_trainer, resolve
from jaxsparse.cli.run_config import RunConfig, load_config
from jaxsparse.cli.run_folder import CHECKPOINTS, METRICS, PICTURE, share_run_folder
from jaxsparse.cli.splits import Split, check_files, load_final_split, load_split
from jaxsparse.cli.tell import final_metrics, print_result, tell
from jaxsparse.distributed import is_first
from jaxsparse.train import KeepBest, Trainer, TrainState


def run_train(
    run: str | None, assignments: Sequence[str], *, run_dir: str | None, only_json: bool
) -> int:
    """Trains, evaluates, saves the state and prints the result; returns the exit code."""
    config, source = load_config(run, assignments)
    with config_errors(source):
        config = resolve(config, source)
        check_files(config)
        emb = make_collection(config)
        tell(emb.summary())
        trainer = make_trainer(config, emb)
        train, valid, final = _load(config, emb.features)
    folder = share_run_folder(config, run_dir, emb.mesh)
    state, history = _fit(config, trainer, train, valid, folder)
    result = final_metrics(trainer, state, final)
    speeds = [row["samples_per_s"] for row in history if row["kind"] == "train"]
    result["samples_per_s"] = statistics.median(speeds)
    if jax.process_count() == 1:
        save_state(folder / CHECKPOINTS / str(result["step"]), emb, state)
    print_result(result, folder, only_json)
    return 0


def _load(config: RunConfig, features: Any) -> tuple[Split, Split | None, Split]:
    train = load_split(config, "train", features)
    assert train is not None, "every kind of data has a train split"
    valid = load_split(config, "valid", features)
    final = load_final_split(config, features)
    tell(f"{train.dataset.num_rows:,} rows to train on, {final.dataset.num_rows:,} to judge by")
    return train, valid, final


def _fit(
    config: RunConfig, trainer: Trainer, train: Split, valid: Split | None, folder: Path
) -> tuple[TrainState, list[dict[str, Any]]]:
    section = config.train
    best = KeepBest("auc", patience=section.patience) if section.keep_best else None
    result = trainer.fit(
        train.dataset,
        steps=section.steps,
        epochs=section.epochs if section.steps is None else None,
        state=trainer.init(jax.random.key(config.run.seed)),
        eval_dataset=valid.dataset if valid else None,
        eval_every=section.eval_every,
        log_every=section.log_every,
        callbacks=[best] if best else [],
        metrics_path=folder / METRICS,
    )
    if is_first():
        result.plot(folder / PICTURE)
    if best is None or best.state is None:
        return result.state, result.history
    tell(f"best on valid: AUC {best.value:.4f} at step {best.step:,}")
    return best.state, result.history
