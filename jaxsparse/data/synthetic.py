# SPDX-License-Identifier: Apache-2.0
"""A generated click log whose true click probabilities are known.

The truth (`jaxsparse.data.planted`) is of another family than the models trained on it, so there
is something to learn that they were not built for; and the best AUC anybody can reach is known:
that of the true probabilities.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from jaxsparse.data.planted import Float32s, Terms, bag_levels, spread_levels
from jaxsparse.ragged import Ragged

Array = npt.NDArray[Any]
Columns = dict[str, Array | Ragged]
Split = Literal["train", "eval"]

BLOCK_ROWS = 16_384
"""Rows drawn together: row i depends on (config, seed, split, i // BLOCK_ROWS) alone."""

_STREAMS = {"train": 0, "eval": 1, "truth": 2, "pilot": 3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticField:
    """A categorical column with keys 0 … vocabulary_size - 1, Zipf-like."""

    name: str
    """Name of the column."""

    vocabulary_size: int
    """Number of distinct keys."""

    exponent: float = 0.9
    """The r-th most frequent key comes about r**-exponent times as often; not exactly 1."""

    mean_length: int | None = None
    """None: one key a row. Else bags of 0 … 2 * mean_length keys, every length equally often."""

    weight: float = 1.0
    """Weight of the field's own threshold in the truth."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        owner = f"SyntheticField {self.name!r}"
        if self.vocabulary_size < 1:
            raise ValueError(f"{owner}: vocabulary_size must be >= 1, got {self.vocabulary_size}")
        if self.exponent < 0 or self.exponent == 1:
            raise ValueError(f"{owner}: exponent must be >= 0 and not 1, got {self.exponent}")
        if self.mean_length is not None and self.mean_length < 1:
            raise ValueError(f"{owner}: mean_length must be None or >= 1, got {self.mean_length}")


DEFAULT_FIELDS = (
    SyntheticField(name="country", vocabulary_size=100),
    SyntheticField(name="device", vocabulary_size=150),
    SyntheticField(name="category", vocabulary_size=200),
    SyntheticField(name="publisher", vocabulary_size=300, exponent=1.05),
    SyntheticField(name="advertiser", vocabulary_size=500, exponent=1.1),
    SyntheticField(name="campaign", vocabulary_size=1_000, exponent=1.15, weight=0.6),
    SyntheticField(name="item", vocabulary_size=5_000, exponent=1.2, weight=0.4),
    SyntheticField(name="user", vocabulary_size=20_000, exponent=1.25, weight=0.3),
    SyntheticField(name="clicked", vocabulary_size=500, exponent=1.1, mean_length=3, weight=0.5),
    SyntheticField(name="tags", vocabulary_size=200, mean_length=2),
)
"""Ten fields, two of them bags. What is to be learned sits in keys seen often enough for one pass
over 10**6 rows: the gap between reached and best AUC there is .005."""

DEFAULT_PRODUCTS = (
    ("country", "device"),
    ("device", "category"),
    ("category", "publisher"),
    ("publisher", "advertiser"),
    ("country", "category", "advertiser"),
)
"""Fields whose levels are multiplied in the truth."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """What `synthetic_click_log` generates."""

    fields: tuple[SyntheticField, ...] = DEFAULT_FIELDS
    """Categorical columns."""

    products: tuple[tuple[str, ...], ...] = DEFAULT_PRODUCTS
    """Names of the fields multiplied with each other in the truth."""

    product_weight: float = 0.8
    """Weight of each product's threshold."""

    num_dense: int = 5
    """Number of dense columns ``dense_0`` …: standard normal, float32."""

    dense_weight: float = 0.8
    """Weight of each dense column's threshold."""

    logit_stddev: float = 2.2
    """Standard deviation of the true logit over the rows: how much can be known."""

    logit_mean: float = -1.5
    """Mean of the true logit: how many rows are clicks."""

    label_noise: float = 0.02
    """Probability that a label is flipped, in [0, .5); part of the true probability."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        names = [field.name for field in self.fields]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"SyntheticConfig: fields must have unique names, got {names}")
        for name in {name for product in self.products for name in product} - set(names):
            raise ValueError(f"SyntheticConfig: products name {name!r}, not among fields {names}")
        if self.num_dense < 0:
            raise ValueError(f"SyntheticConfig: num_dense must be >= 0, got {self.num_dense}")
        if not 0 <= self.label_noise < 0.5:
            raise ValueError(
                f"SyntheticConfig: label_noise must be in [0, .5), got {self.label_noise}"
            )

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Names of the dense columns."""
        return tuple(f"dense_{index}" for index in range(self.num_dense))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Truth:
    """What (config, seed) plant, and the scale that gives the logit its spread and mean."""

    config: SyntheticConfig
    seed: int
    keys: tuple[Array, ...]
    levels: tuple[Float32s, ...]
    terms: Terms
    scale: float = 1.0
    shift: float = 0.0


def synthetic_click_log(
    num_rows: int,
    seed: int = 0,
    *,
    split: Split = "train",
    config: SyntheticConfig | None = None,
) -> tuple[Columns, npt.NDArray[np.float64]]:
    """Generates the first ``num_rows`` rows of a click log.

    Args:
        num_rows: how many; a row does not depend on how many are asked for.
        seed: >= 0. It plants the truth and draws the rows.
        split: rows of ``train`` and of ``eval`` have the same truth and are drawn independently,
            from streams of their own.
        config: columns, truth and noise; None is the default.

    Returns:
        The columns: fields (``[num_rows]`` int64 or `Ragged`), ``dense_0`` … (``[num_rows]``
        float32) and ``label`` (``[num_rows]`` float32, 0 or 1); and the true probabilities of
        label 1, ``[num_rows]`` float64.

    Raises:
        ValueError: an argument out of range.

    >>> columns, probability = synthetic_click_log(1000, seed=1)
    >>> columns["clicked"].num_bags, columns["item"].dtype, probability.shape
    (1000, dtype('int64'), (1000,))
    """
    if num_rows < 1 or seed < 0:
        raise ValueError(f"num_rows must be >= 1 and seed >= 0, got {num_rows} and {seed}")
    if split not in get_args(Split):
        raise ValueError(f"split must be one of {get_args(Split)}, got {split!r}")
    truth = _plant(config or SyntheticConfig(), seed)
    count = -(-num_rows // BLOCK_ROWS)
    blocks = [_draw_block(truth, _STREAMS[split], index) for index in range(count)]
    columns = {name: _join([block[0][name] for block in blocks], num_rows) for name in blocks[0][0]}
    probability = np.concatenate([block[1] for block in blocks])[:num_rows]
    return columns, probability


def _join(parts: list[Array | Ragged], num_rows: int) -> Array | Ragged:
    bags = [part for part in parts if isinstance(part, Ragged)]
    if bags:
        return Ragged.concatenate(bags).slice(0, num_rows)
    return np.concatenate([part for part in parts if not isinstance(part, Ragged)])[:num_rows]


def _generator(*entropy: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(entropy)))


def _plant(config: SyntheticConfig, seed: int) -> _Truth:
    rng = _generator(seed, _STREAMS["truth"])
    sizes = [field.vocabulary_size for field in config.fields]
    position = {field.name: index for index, field in enumerate(config.fields)}
    truth = _Truth(
        config=config,
        seed=seed,
        keys=tuple(rng.permutation(size).astype(np.int64) for size in sizes),
        levels=tuple(spread_levels(size, rng.random()) for size in sizes),
        terms=Terms(
            weights=tuple(field.weight for field in config.fields),
            is_bag=tuple(field.mean_length is not None for field in config.fields),
            products=tuple(tuple(position[name] for name in p) for p in config.products),
            product_weight=config.product_weight,
            dense_thresholds=tuple(rng.uniform(-0.7, 0.7, config.num_dense).tolist()),
            dense_weight=config.dense_weight,
        ),
    )
    logit = _draw_features(truth, _generator(seed, _STREAMS["pilot"]))[1]
    spread = float(logit.std())
    scale = config.logit_stddev / spread if spread else 1.0
    return dataclasses.replace(
        truth, scale=scale, shift=config.logit_mean - scale * float(logit.mean())
    )


def _draw_block(truth: _Truth, stream: int, index: int) -> tuple[Columns, npt.NDArray[np.float64]]:
    rng = _generator(truth.seed, stream, index)
    columns, raw_logit = _draw_features(truth, rng)
    logit = truth.scale * raw_logit.astype(np.float64) + truth.shift
    noise = truth.config.label_noise
    probability = noise + (1 - 2 * noise) / (1 + np.exp(-logit))
    columns["label"] = (rng.random(BLOCK_ROWS) < probability).astype(np.float32)
    return columns, probability


def _draw_features(truth: _Truth, rng: np.random.Generator) -> tuple[Columns, Float32s]:
    columns: Columns = {}
    row_levels = []
    for field, keys, levels in zip(truth.config.fields, truth.keys, truth.levels, strict=True):
        if field.mean_length is None:
            ranks = _draw_ranks(rng, field, BLOCK_ROWS)
            columns[field.name] = keys[ranks]
            row_levels.append(levels[ranks])
        else:
            lengths = rng.integers(0, 2 * field.mean_length + 1, BLOCK_ROWS)
            ranks = _draw_ranks(rng, field, int(lengths.sum()))
            columns[field.name] = Ragged.from_lengths(keys[ranks], lengths)
            row_levels.append(bag_levels(levels[ranks], lengths))
    dense = rng.standard_normal((BLOCK_ROWS, truth.config.num_dense), np.float32)
    columns |= dict(zip(truth.config.dense_names, dense.T, strict=True))
    return columns, truth.terms.logit(row_levels, dense)


def _draw_ranks(rng: np.random.Generator, field: SyntheticField, count: int) -> Array:
    """Ranks ``[count]`` int64 of keys, by inverting the CDF of the bounded power law."""
    power = 1 - field.exponent
    most = (field.vocabulary_size + 1.0) ** power - 1
    ranks = (1 + most * rng.random(count)) ** (1 / power)
    # Rounding may reach the open end of the interval.
    keys: Array = np.minimum(ranks.astype(np.int64), field.vocabulary_size) - 1
    return keys
