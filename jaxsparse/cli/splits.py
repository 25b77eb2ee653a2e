# SPDX-License-Identifier: Apache-2.0
"""The data of a run: its splits, read or generated, and their keys checked against the tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax

from jaxsparse.cli.run_config import RunConfig, SyntheticData
from jaxsparse.config import ConfigError
from jaxsparse.data import (
    ArrayDataset,
    BadRows,
    BatchShare,
    ColumnFiles,
    ColumnSchema,
    DataError,
    OnBadRow,
    SplitFiles,
    StreamDataset,
    from_arrays,
    synthetic_click_log,
)
from jaxsparse.data.sources import find_sources
from jaxsparse.hashing import Identity
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

    skips: bool = False
    """Whether bad rows are left out."""

    @property
    def bad_rows(self) -> BadRows:
        """What was skipped."""
        return self.dataset.bad_rows if isinstance(self.dataset, StreamDataset) else BadRows()


def load_split(config: RunConfig, name: SplitName, features: Sequence[FeatureSpec]) -> Split | None:
    """Opens or generates a split; None where the run has none of that name.

    The first batch of a stream is drawn, so that most of what is wrong with its columns is told
    before anything is made of it.

    Raises:
        DataError: a file is missing or broken, or a key is outside its table.
        ConfigError: the schema and the tables do not fit.
    """
    count = jax.process_count()
    options: dict[str, Any] = {"batch_size": config.train.eval_batch_size}
    if name == "train":
        options = {
            "batch_size": config.train.batch_size,
            "shuffle": config.train.shuffle,
            "seed": config.run.seed,
        }
    data = config.data
    if isinstance(data, SyntheticData):
        return _generate(data, name, options)
    if isinstance(data, ColumnFiles):
        data = dataclasses.replace(data, columns=limited(data.columns, features))
    if name != "train":
        # Metrics do not depend on it, but processes share batches evenly.
        options["batch_size"] = max(options["batch_size"] // count, 1) * count
    options |= {"process_index": jax.process_index(), "process_count": count}
    stream = data.stream(name, **options)
    if stream is None:
        return None
    _draw_first(stream, name)
    return Split(name, stream, skips=data.on_bad_row == "skip")


def limited(schema: ColumnSchema, features: Sequence[FeatureSpec]) -> ColumnSchema:
    """A schema that refuses keys without a row: then a message has their file and line.

    Raises:
        ConfigError: keys are strings and their table takes integers as rows.
    """
    columns: dict[str, Any] = {**schema.feature_columns()}
    for feature in features:
        table, column = feature.table, columns[feature.name]
        if not isinstance(table.keys, Identity):
            continue
        if column.type == "string":
            raise ConfigError(
                f"feature {feature.name!r}: its keys are strings, and table {table.name!r} takes "
                'integers as rows; set its keys = { kind = "hashed" }'
            )
        # A padding id need not be a row; where there is one the tables look at the keys.
        if table.keys.out_of_range == "error" and feature.padding_id is None:
            limit = min(column.limit or table.vocabulary_size, table.vocabulary_size)
            columns[feature.name] = dataclasses.replace(column, limit=limit)
    return dataclasses.replace(schema, features=columns)


def _draw_first(stream: StreamDataset, name: SplitName) -> None:
    bad = stream.bad_rows
    if not len(stream):
        raise DataError(f"data.{name}: there are no rows, {bad.total:,} were skipped")
    start = stream.state()
    batches = iter(stream)
    next(batches)
    stream.restore(start)


def _share(dataset: ArrayDataset) -> ArrayDataset | BatchShare:
    """This process's part of data that every process has generated."""
    if jax.process_count() == 1:
        return dataset
    return BatchShare(dataset, jax.process_index(), jax.process_count())


def load_final_split(config: RunConfig, features: Sequence[FeatureSpec]) -> Split:
    """What a run is judged on: ``test``, without one ``valid``."""
    split = load_split(config, "test", features) or load_split(config, "valid", features)
    if split is None:
        raise ConfigError("data.test: is missing, and so is data.valid: nothing to evaluate on")
    return split


def bad_row_assignment(on_bad_row: OnBadRow | None) -> list[str]:
    """What ``--on-bad-row`` stands for."""
    return [] if on_bad_row is None else [f"data.on_bad_row={on_bad_row}"]


def check_files(config: RunConfig) -> None:
    """Raises for the first file of any split that is not there, before any of them is read."""
    if isinstance(config.data, SplitFiles):
        for name in ("train", "valid", "test"):
            try:
                if paths := config.data.paths(name):
                    find_sources(paths)
            except DataError as error:
                raise DataError(f"{error} (data.{name})") from error


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
