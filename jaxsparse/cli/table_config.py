# SPDX-License-Identifier: Apache-2.0
"""Sections of a run's TOML about tables and features."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from jaxsparse.cli.schedules import Rate
from jaxsparse.config import one_of
from jaxsparse.dynamic import (
    LFU,
    LRU,
    TTL,
    BloomAdmission,
    CountAdmission,
    Dynamic,
    L2Norm,
    ProbabilityAdmission,
)
from jaxsparse.hashing import Hashed, Identity
from jaxsparse.initializers import constant, normal, uniform
from jaxsparse.optimizers import SGD, Adagrad, Adam, Ftrl, RowwiseAdagrad
from jaxsparse.specs import Placement, Truncate
from jaxsparse.tiers import Tiers

SparseRule = Annotated[
    Any,
    one_of(
        sgd=SGD, adagrad=Adagrad, rowwise_adagrad=RowwiseAdagrad, adam=Adam, ftrl=Ftrl
    ).with_fields(learning_rate=Rate),
]
AdmissionRule = Annotated[
    Any,
    one_of(count=CountAdmission, probability=ProbabilityAdmission, bloom=BloomAdmission),
]
EvictionRule = Annotated[Any, one_of(lru=LRU, lfu=LFU, ttl=TTL, l2_norm=L2Norm)]
Keys = Annotated[
    Any,
    one_of(identity=Identity, hashed=Hashed, dynamic=Dynamic).with_fields(
        admission=AdmissionRule | None, eviction=EvictionRule | None
    ),
]
Init = Annotated[Any, one_of(uniform=uniform, normal=normal, constant=constant)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableSection:
    """``[tables.<name>]``, and ``[table_defaults]`` for what a table leaves out.

    Fields are those of `TableSpec`.
    """

    vocabulary_size: int | None = None
    """Rows. The synthetic log's own tables know theirs, tables of dynamic keys have none."""

    embedding_dim: int | None = None
    """Width of a row; default 16."""

    optimizer: SparseRule | None = None
    """Rule with its learning rate; default Adagrad at 0.05."""

    keys: Keys | None = None
    """How keys become rows; default identity."""

    placement: Placement | None = None
    """Default auto."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Default float32."""

    initializer: Init | None = None
    """Default uniform in +-0.05."""

    trainable: bool | None = None
    """Default true."""

    tiers: Tiers | None = None
    """How many rows lie on the devices and in memory, and folders of disks for the others, in
    which a run makes a folder of its own; default all on the devices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureSection:
    """``[features.<name>]``, and ``[feature_defaults]`` for what a feature leaves out.

    Every feature column of the data is a feature; fields are those of `FeatureSpec`.
    """

    table: str | None = None
    """Name of its table; default a table named as the feature."""

    combiner: Literal["sum", "mean", "sqrtn"] | None = None
    """Default sum."""

    max_length: int | None = None
    """Most ids in a bag."""

    truncate: Truncate | None = None
    """What happens to longer bags; default error."""

    padding_id: int | None = None
    """Key that stands for nothing."""
