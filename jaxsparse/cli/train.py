# SPDX-License-Identifier: Apache-2.0
"""``jaxsparse train``."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxsparse.ckpt import CheckpointError, CheckpointManager
from jaxsparse.cli.resolve import config_errors, resolve
from jaxsparse.cli.row_disks import open_trainer
from jaxsparse.cli.run_config import RunConfig, load_config
from jaxsparse.cli.run_folder import (
    METRICS,
    PICTURE,
    PROFILE,
    check_run_folder,
    make_manager,
    restore_config,
    saved_config,
    share_run_folder,
)
from jaxsparse.cli.splits import Split, check_files, load_final_split, load_split
from jaxsparse.cli.tell import (
    final_metrics,
    print_json,
    print_result,
    skipped_rows,
    tell,
    tell_skipped,
)
from jaxsparse.config import ConfigError
from jaxsparse.distributed import is_first
from jaxsparse.train import (
    BestEvaluation,
    FitResult,
    KeepBest,
    ProfileSteps,
    Trainer,
    TrainState,
)
from jaxsparse.train.run_state import Resume


def run_train(
    run: str | None,
    assignments: Sequence[str],
    *,
    run_dir: str | None,
    resume: Resume,
    allow_new: bool,
    profile: str | None,
    only_json: bool,
) -> int:
    """Trains, saves, evaluates and prints the result; returns the exit code.

    A run that SIGTERM ends is saved and not evaluated.
    """
    profiled = None if profile is None else _parse_profile(profile)
    if run is None and run_dir is not None and resume != "never":
        run = saved_config(run_dir)
    config, source = load_config(run, assignments)
    with config_errors(source):
        config = resolve(config, source)
        if is_first():  # the others would see what it makes
            check_run_folder(config, run_dir, resume)
        check_files(config)
    with contextlib.ExitStack() as stack:
        with config_errors(source):
            trainer = stack.enter_context(open_trainer(config))
            tell(trainer.emb.summary())
            splits = _load(config, trainer.emb.features)
        folder, old_config = share_run_folder(config, run_dir, trainer.emb.mesh, resume)
        manager = make_manager(folder, config, allow_new=allow_new)
        if old_config is not None and manager.latest() is None:
            tell(f"{folder}: has no save to go on from, starts at step 0")
        trace = None
        if profiled is not None and is_first():
            trace = ProfileSteps(*profiled, folder / PROFILE)
        run_in = _RunFolder(config, source, folder, manager, old_config)
        return _train(run_in, trainer, splits, trace, only_json=only_json)


@dataclasses.dataclass(frozen=True)
class _RunFolder:
    """A run, and where it is kept."""

    config: RunConfig
    source: str
    folder: Path
    manager: CheckpointManager
    old_config: str | None
    """Text of the configuration that the folder had."""


def _train(
    run: _RunFolder,
    trainer: Trainer,
    splits: _Splits,
    trace: ProfileSteps | None,
    *,
    only_json: bool,
) -> int:
    train, valid, final = splits
    config, folder, manager = run.config, run.folder, run.manager
    try:
        # A batch that the tables or the exchange cannot take is bad input too.
        with config_errors(run.source):
            state, fit = _fit(config, trainer, train, valid, folder, manager, trace)
    except CheckpointError:
        if is_first():
            restore_config(folder, run.old_config)
        raise
    except KeyboardInterrupt:
        latest = manager.latest()
        if latest is None:
            tell(f"nothing was saved yet; checkpoint.every is {config.checkpoint.every:,} steps")
        else:
            tell(f"saved at step {latest:,}; go on with --run-dir {folder} --resume must")
        raise
    if trace is not None:
        tell(trace.told)
    if fit.interrupted:
        _draw(fit, folder)
        step = int(state.step)
        tell(f"interrupted and saved at step {step:,}; go on with --resume must")
        print_json({"step": step, "interrupted": True}, folder)
        return 0
    with config_errors(run.source):  # such as weights that are all 0
        result = final_metrics(trainer, state, final)
    result["samples_per_s"] = fit.samples_per_s
    result["input_wait"] = fit.input_wait
    if train.skips:
        result["skipped_rows"] = skipped_rows(train, valid, final)
    _draw(fit, folder, final=result, best_auc=final.best_auc)
    print_result(result, folder, only_json)
    return 0


_Splits = tuple[Split, Split | None, Split]


def _load(config: RunConfig, features: Any) -> _Splits:
    train = load_split(config, "train", features)
    assert train is not None, "every kind of data has a train split"
    valid = load_split(config, "valid", features)
    final = load_final_split(config, features)
    tell(f"{train.dataset.num_rows:,} rows to train on, {final.dataset.num_rows:,} to judge by")
    for split in {split.name: split for split in (train, valid, final) if split}.values():
        tell_skipped(split)
    return train, valid, final


def _fit(
    config: RunConfig,
    trainer: Trainer,
    train: Split,
    valid: Split | None,
    folder: Path,
    manager: CheckpointManager,
    trace: ProfileSteps | None,
) -> tuple[TrainState, FitResult]:
    """The state to judge, and what `Trainer.fit` returned."""
    section = config.train
    best: BestEvaluation | None = None
    if section.keep_best:
        # A row store has the rows of one state: the best one is that of a save then.
        kind = BestEvaluation if trainer.emb.stored_tables else KeepBest
        best = kind("auc", patience=section.patience)
    result = trainer.fit(
        train.dataset,
        steps=section.steps,
        epochs=section.epochs if section.steps is None else None,
        seed=config.run.seed,
        eval_dataset=valid.dataset if valid else None,
        eval_every=section.eval_every,
        log_every=section.log_every,
        callbacks=[best] if best else [],
        checkpoint=manager,
        metrics_path=folder / METRICS,
        events_folder=folder,
        profile=trace,
        batches_per_pass=section.batches_per_pass,
    )
    if best is None or math.isnan(best.value) or result.interrupted:
        return result.state, result
    tell(f"best on valid: AUC {best.value:.4f} at step {best.step:,}")
    if isinstance(best, KeepBest):
        assert best.state is not None, "there was an evaluation"
        return best.state, result
    return manager.restore(trainer.emb, result.state, best.step, trainer.store).state, result


def _draw(fit: FitResult, folder: Path, **more: Any) -> None:
    if is_first():
        try:
            fit.plot(folder / PICTURE, **more)
        except OSError as error:  # the run itself is saved
            tell(f"no picture: {error}")


def _parse_profile(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
    start, stop = map(int, found.groups()) if found else (0, 0)
    if stop <= start:
        raise ConfigError(
            f"--profile: expected START:STOP, two global steps with START < STOP, got {text!r}"
        )
    return start, stop
