# SPDX-License-Identifier: Apache-2.0
"""Fills in what a run's TOML left out, and makes specs, model and trainer of it."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxsparse.ckpt import CheckpointError
from jaxsparse.cli.run_config import MeshSection, RunConfig
from jaxsparse.cli.table_config import FeatureSection, TableSection
from jaxsparse.config import ConfigError
from jaxsparse.data import ColumnFiles, CriteoFiles, DataError, SplitFiles
from jaxsparse.dynamic import TTL, Dynamic
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.hashing import Identity
from jaxsparse.initializers import uniform
from jaxsparse.mesh import make_mesh
from jaxsparse.models import DLRM
from jaxsparse.optimizers import Adagrad
from jaxsparse.specs import Exchange, FeatureSpec, TableSpec
from jaxsparse.train import Trainer

TABLE_DEFAULTS = TableSection(
    embedding_dim=16,
    optimizer=Adagrad(0.05),
    keys=Identity(),
    placement="auto",
    dtype="float32",
    initializer=uniform(0.05),
    trainable=True,
)
FEATURE_DEFAULTS = FeatureSection(combiner="sum", truncate="error")


@contextlib.contextmanager
def config_errors(source: str) -> Iterator[None]:
    """Turns what specs, model and planner refuse into a `ConfigError` that names the file."""
    try:
        yield
    except (ConfigError, DataError, CheckpointError):
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{source}: {error}") from error


def resolve(config: RunConfig, source: str) -> RunConfig:
    """The same run with every table and feature written out and all folders absolute.

    Raises:
        ConfigError: a section names no feature or table there is, or a table lacks its rows.
    """
    names = feature_names(config)
    _check_known(f"{source}: features", config.features, names, "feature columns of the data")
    features = {
        name: _filled(config.features.get(name), config.feature_defaults, FEATURE_DEFAULTS)
        for name in names
    }
    features = {
        name: section if section.table else dataclasses.replace(section, table=name)
        for name, section in features.items()
    }
    used = [section.table for section in features.values()]
    _check_known(f"{source}: tables", config.tables, used, "tables that features look up")
    tables = {
        name: _filled(config.tables.get(name), config.table_defaults, TABLE_DEFAULTS)
        for name in dict.fromkeys(used)
    }
    data = config.data
    if isinstance(data, SplitFiles) and "://" not in data.dir:
        data = dataclasses.replace(data, dir=str(Path(data.dir).absolute()))
    return dataclasses.replace(
        config,
        data=data,
        table_defaults=TableSection(),
        tables={
            name: _with_absolute_disks(_with_rows(config, features, name, section, source))
            for name, section in tables.items()
        },
        feature_defaults=FeatureSection(),
        features=features,
    )


def feature_names(config: RunConfig) -> list[str]:
    """Features of the data, in order."""
    if isinstance(config.data, CriteoFiles):
        return list(config.data.feature_names)
    if isinstance(config.data, ColumnFiles):
        return list(config.data.columns.features)
    return [field.name for field in config.data.config.fields]


def dense_names(config: RunConfig) -> list[str]:
    """Dense columns of the data, in the order the model gets them."""
    if isinstance(config.data, CriteoFiles):
        return list(config.data.dense_names)
    if isinstance(config.data, ColumnFiles):
        return list(config.data.columns.dense)
    return list(config.data.config.dense_names)


def make_features(config: RunConfig) -> list[FeatureSpec]:
    """The specs of a resolved run."""
    tables = {
        name: TableSpec(name, **_set_fields(section)) for name, section in config.tables.items()
    }
    features = []
    for name, section in config.features.items():
        options = {k: v for k, v in _set_fields(section).items() if k != "table"}
        features.append(FeatureSpec(name, tables[str(section.table)], **options))
    return features


def make_collection(config: RunConfig, num_devices: int | None = None) -> EmbeddingCollection:
    """The tables of a resolved run on its mesh.

    Args:
        config: resolved.
        num_devices: instead of ``mesh.devices``; then of one axis.
    """
    section = config.mesh if num_devices is None else MeshSection(devices=num_devices)
    there = jax.devices()
    count = len(there) if section.devices is None else section.devices
    if count > len(there):
        raise ConfigError(
            f"mesh.devices: {count} asked for, {len(there)} there; "
            "--devices forces that many CPU devices"
        )
    mesh = make_mesh(section.nodes, devices=there[:count])
    exchange = Exchange(capacity=config.mesh.capacity)
    return EmbeddingCollection(make_features(config), mesh=mesh, exchange=exchange)


def make_trainer(config: RunConfig, emb: EmbeddingCollection) -> Trainer:
    """Model and optimizers of a resolved run."""
    model = DLRM.for_features(
        emb.features,
        num_dense=len(dense_names(config)),
        bottom=config.model.bottom,
        top=config.model.top,
        rngs=nnx.Rngs(config.run.seed),
    )
    return Trainer(
        model,
        emb,
        optimizer=config.optimizer.make(),
        on_bad_sample=config.train.on_bad_sample,
    )


def _filled(own: Any, *defaults: Any) -> Any:
    """A section with what it leaves out taken from the defaults, the first ones first."""
    sections = [section for section in (own, *defaults) if section is not None]
    fields: dict[str, Any] = {}
    for section in reversed(sections):
        fields |= _set_fields(section)
    return type(sections[0])(**fields)


def _set_fields(section: Any) -> dict[str, Any]:
    fields = dataclasses.fields(section)
    return {f.name: value for f in fields if (value := getattr(section, f.name)) is not None}


def _check_known(where: str, given: Iterable[str], known: Iterable[str], what: str) -> None:
    known = list(dict.fromkeys(known))
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f", did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{where}.{name}: not among the {what}{meant}; known: {known}")


def _with_rows(
    config: RunConfig,
    features: dict[str, FeatureSection],
    name: str,
    section: TableSection,
    source: str,
) -> TableSection:
    """A table with its rows; those of the synthetic log are as long as their fields need."""
    if isinstance(section.keys, Dynamic):
        eviction = section.keys.eviction
        if isinstance(eviction, TTL) and eviction.seconds is not None:
            raise ConfigError(
                f"{source}: tables.{name}.keys.eviction: a run does not know the time of its data; "
                "give TTL steps, or train in Python with RowStore.passes(time=)"
            )
        own = config.tables.get(name, TableSection())
        # A default is for other tables; one that is set here is refused by the specs.
        return dataclasses.replace(section, vocabulary_size=own.vocabulary_size)
    if section.vocabulary_size is not None:
        return section
    if isinstance(config.data, SplitFiles):
        raise ConfigError(
            f"{source}: tables.{name}.vocabulary_size: is missing, expected the number of rows"
        )
    sizes = {field.name: field.vocabulary_size for field in config.data.config.fields}
    rows = max(sizes[feature] for feature, f in features.items() if f.table == name)
    return dataclasses.replace(section, vocabulary_size=rows)


def _with_absolute_disks(section: TableSection) -> TableSection:
    """A table whose folders on disks do not depend on where a command is started."""
    tiers = section.tiers
    if tiers is None:
        return section
    disks = [str(Path(folder).absolute()) for folder in tiers.ssd]
    return dataclasses.replace(section, tiers=dataclasses.replace(tiers, ssd=disks))
