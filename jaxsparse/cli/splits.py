# SPDX-License-Identifier: Apache-2.0
"""The data of a run: its splits, read or generated, and their keys checked against the tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxsparse.cli.run_config import FileData, RunConfig, SyntheticData
from jaxsparse.config import ConfigError
from jaxsparse.data import (
    ArrayDataset,
    BatchShare,
    CriteoFiles,
    DataError,
    StreamDataset,
    from_arrays,
    from_files,
    synthetic_click_log,
)
from jaxsparse.hashing import Identity
from jaxsparse.ragged import Ragged
from jaxsparse.specs import FeatureSpec
from jaxsparse.train import StreamingAUC

SplitName = Literal["train", "valid", "test"]


@dataclasses.dataclass(frozen=True)
class Split:
    """One part of the data."""

    name: SplitName
    dataset: ArrayDataset | StreamDataset | BatchShare
    best_auc: float | None = None
    """AUC of the true probabilities, where they are known."""


def load_split(config: RunConfig, name: SplitName, features: Sequence[FeatureSpec]) -> Split | None:
    """Reads or generates a split; None where the run has none of that name.

    Raises:
        DataError: a file is missing or broken, or a key is outside its table.
        ConfigError: the schema and the data do not fit.
    """
    options: dict[str, Any] = {"batch_size": config.train.eval_batch_size}
    if name == "train":
        options = {
            "batch_size": config.train.batch_size,
            "shuffle": config.train.shuffle,
            "seed": config.run.seed,
        }
    if isinstance(config.data, SyntheticData):
        return _generate(config.data, name, options)
    if isinstance(config.data, CriteoFiles):
        stream = config.data.stream(name, **options)
        return None if stream is None else Split(name, stream)
    paths = config.data.paths(name)
    if not paths:
        return None
    dataset = from_files([str(path) for path in paths], config.data.columns, **options)
    for feature in features:
        check_keys(feature, dataset.rows.features[feature.name], paths)
    return Split(name, _share(dataset))


def _share(dataset: ArrayDataset) -> ArrayDataset | BatchShare:
    """This process's part of data that every process has read or generated."""
    if jax.process_count() == 1:
        return dataset
    return BatchShare(dataset, jax.process_index(), jax.process_count())


def load_final_split(config: RunConfig, features: Sequence[FeatureSpec]) -> Split:
    """What a run is judged on: ``test``, without one ``valid``."""
    split = load_split(config, "test", features) or load_split(config, "valid", features)
    if split is None:
        raise ConfigError("data.test: is missing, and so is data.valid: nothing to evaluate on")
    return split


def check_files(config: RunConfig) -> None:
    """Raises for the first file of any split that is not there, before any of them is read."""
    if isinstance(config.data, FileData):
        for name in ("train", "valid", "test"):
            for path in config.data.paths(name):
                if not path.exists():
                    raise DataError(f"{path}: no such file (data.{name})")


def check_keys(
    feature: FeatureSpec, column: np.ndarray[Any, Any] | Ragged, paths: list[Path]
) -> None:
    """Raises where a key has no row in an `Identity` table, naming file, row and value."""
    table = feature.table
    if not isinstance(table.keys, Identity):
        return
    source = ", ".join(map(str, paths))
    values = column.values if isinstance(column, Ragged) else column
    if values.dtype.kind not in "iu":
        raise DataError(
            f"{source}: feature {feature.name!r}: keys such as {values.flat[0]!r} are not integers "
            f'and table {table.name!r} takes them as rows; set its keys = {{ kind = "hashed" }}'
        )
    if table.keys.out_of_range == "ignore":
        return
    outside = (values < 0) | (values >= table.vocabulary_size)
    if feature.padding_id is not None:
        outside &= values != feature.padding_id
    if outside.any():
        position = int(outside.argmax())
        row = position
        if isinstance(column, Ragged):
            row = int(np.searchsorted(column.row_splits, position, side="right")) - 1
        raise DataError(
            f"{source}: {_place(row, paths)}: feature {feature.name!r}: key {values[position]} is "
            f"outside 0..{table.vocabulary_size - 1} of table {table.name!r}"
        )


def _place(row: int, paths: list[Path]) -> str:
    """Lines are those of a file with one line a row, the header being line 1."""
    if len(paths) == 1 and ".parquet" not in paths[0].suffixes:
        return f"line {row + 2}"
    return f"row {row}"


def _generate(data: SyntheticData, name: SplitName, options: dict[str, Any]) -> Split | None:
    if name == "valid":
        return None
    log: Literal["train", "eval"] = "train" if name == "train" else "eval"
    num_rows = data.train_rows if name == "train" else data.test_rows
    columns, probability = synthetic_click_log(num_rows, data.seed, split=log, config=data.config)
    dataset = from_arrays(columns, dense=data.config.dense_names, **options)
    if name == "train":
        return Split(name, _share(dataset))
    auc = StreamingAUC()
    auc.update(probability, dataset.rows.labels)
    return Split(name, _share(dataset), auc.result())
