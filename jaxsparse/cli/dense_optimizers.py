# SPDX-License-Identifier: Apache-2.0
"""Optimizers of the dense parameters, as a run's TOML names them."""

from __future__ import annotations

import dataclasses

import optax

from jaxsparse.cli.schedules import Rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseAdam:
    """``[optimizer]`` with ``kind = "adam"``."""

    learning_rate: Rate = 1e-3
    """A number >= 0, or a schedule of the global step."""

    b1: float = 0.9
    """Decay of the first moment, in [0, 1)."""

    b2: float = 0.999
    """Decay of the second moment, in [0, 1)."""

    eps: float = 1e-8
    """Added to the root, >= 0."""

    weight_decay: float = 0.0
    """Decoupled decay, >= 0."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        _in_range(self, learning_rate=None, eps=None, weight_decay=None, b1=1.0, b2=1.0)

    def make(self) -> optax.GradientTransformation:
        """The optax transformation."""
        return optax.adamw(
            self.learning_rate, self.b1, self.b2, self.eps, weight_decay=self.weight_decay
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseAdagrad:
    """``[optimizer]`` with ``kind = "adagrad"``."""

    learning_rate: Rate = 1e-2
    """As of ``adam``."""

    initial_accumulator: float = 0.1
    """Sum of squared gradients to start with, >= 0."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        _in_range(self, learning_rate=None, initial_accumulator=None)

    def make(self) -> optax.GradientTransformation:
        """The optax transformation."""
        return optax.adagrad(self.learning_rate, self.initial_accumulator)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseSGD:
    """``[optimizer]`` with ``kind = "sgd"``."""

    learning_rate: Rate = 1e-2
    """As of ``adam``."""

    momentum: float = 0.0
    """In [0, 1)."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        _in_range(self, learning_rate=None, momentum=1.0)

    def make(self) -> optax.GradientTransformation:
        """The optax transformation."""
        return optax.sgd(self.learning_rate, self.momentum or None)


def _in_range(section: object, **limits: float | None) -> None:
    """Raises where a field is negative, or not below its limit."""
    for name, limit in limits.items():
        value = getattr(section, name)
        if callable(value):
            continue  # a schedule, which has checked itself
        if value < 0 or (limit is not None and value >= limit):
            below = "" if limit is None else f" and < {limit:g}"
            raise ValueError(f"{name} must be >= 0{below}, got {value:g}")
