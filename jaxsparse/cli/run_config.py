# SPDX-License-Identifier: Apache-2.0
"""What a run's TOML may say: one frozen dataclass a section."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxsparse.cli.dense_optimizers import DenseAdagrad, DenseAdam, DenseSGD
from jaxsparse.cli.table_config import FeatureSection, TableSection
from jaxsparse.config import one_of, override, parse, read_toml
from jaxsparse.data import ColumnFiles, CriteoFiles, SplitFiles, SyntheticConfig
from jaxsparse.train.batches import OnBadSample

SYNTHETIC = Path(__file__).with_name("synthetic.toml")
"""The built-in example, run by ``jaxsparse train`` without a file."""


def _at_least(section: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None and value < least:
            raise ValueError(f"{name} must be >= {least}, got {value}")


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in 0..{2**32 - 1}, got {seed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSection:
    """``[run]``."""

    name: str = "run"
    """The run's folder is ``runs/<name>``, with a number behind it if that exists."""

    seed: int = 0
    """Of the tables, the dense model and the order of the rows, >= 0."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(f"name must be the name of a folder, got {self.name!r}")
        _check_seed(self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticData:
    """``[data]`` with ``kind = "synthetic"``: the generated click log."""

    train_rows: int = 1_048_576
    """Rows trained on."""

    test_rows: int = 131_072
    """Rows evaluated on at the end, disjoint from the others."""

    seed: int = 0
    """Of truth and rows, >= 0."""

    config: SyntheticConfig = dataclasses.field(default_factory=SyntheticConfig)
    """Columns, truth and noise."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        _at_least(self, 1, "train_rows", "test_rows")
        _check_seed(self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSection:
    """``[model]``."""

    kind: Literal["dlrm"] = "dlrm"
    """The model."""

    bottom: tuple[int, ...] = ()
    """Widths of the bottom MLP, the last one the embedding dim; empty for none."""

    top: tuple[int, ...] = (64, 32)
    """Widths of the hidden layers of the top MLP."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        for name in ("bottom", "top"):
            widths = getattr(self, name)
            if any(width < 1 for width in widths):
                raise ValueError(f"{name} must hold widths >= 1, got {list(widths)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSection:
    """``[train]``."""

    batch_size: int = 4096
    """Samples of a step, over all devices."""

    eval_batch_size: int = 16_384
    """Samples of a batch of an evaluation."""

    epochs: int = 1
    """Passes over the training data, unless ``steps`` is set."""

    steps: int | None = None
    """Steps to train."""

    shuffle: bool = True
    """Every epoch in another order; false keeps the files' order."""

    log_every: int = 50
    """Steps between rows of ``metrics.jsonl``."""

    eval_every: int | None = None
    """Steps between evaluations on ``valid``; default after each epoch."""

    on_bad_sample: OnBadSample = "error"
    """What happens to samples with a label, weight or dense value that is not finite: ``error``,
    ``drop`` the samples or ``skip`` the batch."""

    batches_per_pass: int | None = None
    """Batches whose rows are brought to the devices together, for tables with dynamic keys or
    tiers; default as many as fit well, at most 16."""

    keep_best: bool = False
    """Keep the state with the best AUC on ``valid``, not the last one."""

    patience: int | None = None
    """With ``keep_best``: evaluations without a better AUC after which training stops."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        names = ("batch_size", "eval_batch_size", "epochs", "steps", "log_every", "eval_every")
        _at_least(self, 1, *names, "batches_per_pass", "patience")
        if self.patience is not None and not self.keep_best:
            raise ValueError("patience needs keep_best = true")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """``[checkpoint]``: saves of the run; the last state is always saved."""

    every: int = 1000
    """Steps between saves."""

    keep: int = 3
    """Newest saves that are kept; with ``train.keep_best`` the best one is as well."""

    background: bool = False
    """Write while training goes on; needs the state's bytes once more in host memory."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        _at_least(self, 1, "every", "keep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSection:
    """``[mesh]``."""

    devices: int | None = None
    """Devices used; default all there are."""

    nodes: int | None = None
    """Length of a first mesh axis ``node``; default one axis."""

    capacity: int | None = None
    """Fixed exchange capacity in rows per pair of devices; default what each batch needs."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        _at_least(self, 1, "devices", "nodes", "capacity")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run."""

    run: RunSection = RunSection()
    data: Annotated[Any, one_of(synthetic=SyntheticData, files=ColumnFiles, criteo=CriteoFiles)]
    table_defaults: TableSection = dataclasses.field(default_factory=TableSection)
    tables: dict[str, TableSection] = dataclasses.field(default_factory=dict)
    feature_defaults: FeatureSection = dataclasses.field(default_factory=FeatureSection)
    features: dict[str, FeatureSection] = dataclasses.field(default_factory=dict)
    model: ModelSection = ModelSection()
    optimizer: Annotated[Any, one_of(adam=DenseAdam, adagrad=DenseAdagrad, sgd=DenseSGD)] = (
        dataclasses.field(default_factory=DenseAdam)
    )
    train: TrainSection = TrainSection()
    checkpoint: CheckpointSection = CheckpointSection()
    mesh: MeshSection = MeshSection()

    def __post_init__(self) -> None:
        """Validates what needs two sections."""
        has_valid = isinstance(self.data, SplitFiles) and bool(self.data.valid)
        if self.train.keep_best and not has_valid:
            raise ValueError("train.keep_best needs data.valid, the files it chooses by")


def load_config(
    path: str | os.PathLike[str] | None, assignments: Sequence[str]
) -> tuple[RunConfig, str]:
    """Reads a run's TOML, the built-in example without a path.

    Returns:
        The configuration, and the name of its file for messages.

    Raises:
        ConfigError: it cannot be used; the text names file, key, what was expected and what came.
    """
    source = str(SYNTHETIC if path is None else path)
    table = override(read_toml(source), assignments)
    return parse(RunConfig, table, source), source
