# SPDX-License-Identifier: Apache-2.0
"""``jaxsparse predict``: a file of predictions, row by row of some data, streamed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxsparse.ckpt import restore_state
from jaxsparse.cli.resolve import config_errors, resolve
from jaxsparse.cli.row_disks import open_trainer
from jaxsparse.cli.run_config import RunConfig, SyntheticData, load_config
from jaxsparse.cli.run_folder import check_dense, choose_checkpoint, find_config
from jaxsparse.cli.splits import SplitName, limited, load_split
from jaxsparse.cli.table_file import check_table_file, write_table
from jaxsparse.cli.tell import print_json, tell
from jaxsparse.config import ConfigError
from jaxsparse.data import ColumnFiles, SplitFiles
from jaxsparse.data.sources import is_among
from jaxsparse.specs import FeatureSpec
from jaxsparse.train import Trainer, TrainState
from jaxsparse.train.batches import Dataset

Columns = dict[str, npt.NDArray[np.float32]]


def run_predict(
    run: str,
    files: Sequence[str],
    assignments: Sequence[str],
    *,
    out: str,
    split: SplitName | None,
    checkpoint: str | None,
    run_dir: str | None,
    only_json: bool,
) -> int:
    """Writes one row of predictions for every row of data, in order; returns the exit code.

    Args:
        run: folder of a run, or its TOML.
        files: data; none for a split of the run.
        assignments: of ``--set``.
        out: ``.parquet`` or ``.csv``.
        split: which one; None is the one `eval` takes.
        checkpoint: ``latest``, ``best``, a step, or None for the one `eval` takes.
        run_dir: the run's folder where ``run`` is a TOML.
        only_json: print the JSON line only.
    """
    check_table_file(Path(out))
    if files and split:
        raise ConfigError("predict: give files or --split, not both")
    config_path, given_folder = _find_run(run, run_dir)
    config, source = load_config(config_path, assignments)
    folder = given_folder or Path("runs", config.run.name)
    save = choose_checkpoint(folder, config, checkpoint)
    with config_errors(source):
        config = resolve(config, source)
        check_dense(config, folder)
        _check_out(out, config, files)
        with open_trainer(config) as trainer:
            name, dataset = _data(config, files, split, trainer.emb.features)
            fresh = trainer.init(jax.random.key(config.run.seed))
            state = restore_state(save, trainer.emb, fresh, trainer.store)
            num_rows = write_table(Path(out), _columns(trainer, state, dataset))
            step = int(state.step)
    if not only_json:
        tell(f"{num_rows:,} predictions of {name} by step {step:,} are in {out}")
    print_json({"step": step, "rows": num_rows, "out": out}, folder)
    return 0


def _find_run(run: str, run_dir: str | None) -> tuple[Path, Path | None]:
    """The configuration, and the run's folder where it is known without reading that."""
    path = Path(run)
    if not path.is_dir():
        if path.is_file():
            return path, None if run_dir is None else Path(run_dir)
        raise ConfigError(f"{run}: no such run: neither a folder nor a TOML file")
    if run_dir is not None:
        raise ConfigError(f"--run-dir: is for a TOML, and {run} is a run's folder already")
    return find_config(run), path


def _check_out(out: str, config: RunConfig, files: Sequence[str]) -> None:
    """Raises where the predictions would take the place of data."""
    data = config.data
    splits = ("train", "valid", "test") if isinstance(data, SplitFiles) else ()
    if is_among(Path(out), [*files, *(path for split in splits for path in data.paths(split))]):
        raise ConfigError(f"--out: {out} is a file of the data, which it would replace")


def _data(
    config: RunConfig,
    files: Sequence[str],
    split: SplitName | None,
    features: Sequence[FeatureSpec],
) -> tuple[str, Any]:
    """Name and batches of the rows, in their order; labels and weights are not looked at."""
    if isinstance(config.data, SyntheticData):
        if files:
            raise ConfigError("predict: the run's data are generated, it cannot read files")
        chosen = split or "test"
        made = load_split(
            dataclasses.replace(config, train=dataclasses.replace(config.train, shuffle=False)),
            chosen,
            features,
        )
        if made is None:
            raise ConfigError(f"--split: the run has no {chosen} data")
        return chosen, made.dataset
    names: list[SplitName] = [split] if split else ["test", "valid"]
    found = next((name for name in names if config.data.paths(name)), None)
    if found is None and not files:
        raise ConfigError(f"data.{' and data.'.join(names)}: nothing there to predict")
    # A row that is left out would shift all behind it.
    data = dataclasses.replace(config.data, on_bad_row="error")
    if isinstance(data, ColumnFiles):
        schema = dataclasses.replace(data.columns, label=None, weight=None)
        data = dataclasses.replace(data, columns=limited(schema, features))
    paths = list(files) or data.paths(str(found))
    return ", ".join(files) or str(found), data.open(paths, config.train.eval_batch_size)


def _columns(trainer: Trainer, state: TrainState, dataset: Dataset) -> Iterator[Columns]:
    for logits in trainer.logits(state, dataset):
        yield {"probability": np.asarray(trainer.link(logits)), "logit": logits}
