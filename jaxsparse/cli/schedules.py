# SPDX-License-Identifier: Apache-2.0
"""Learning rates that change with the global step, as a run's TOML names them.

``learning_rate = { kind = "warmup_cosine", peak_value = 1e-3, warmup_steps = 500, decay_steps =
10_000 }`` in place of a number, for the dense optimizer and for tables. Names and formulas are
optax's; the first update has step 0. Frozen, so that equal ones make equal programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import jax
import numpy as np
import optax

from jaxsparse.config import one_of

STEPS_END = 2**31
"""Steps are int32 where the rate is computed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Schedule:
    """A schedule of optax, which takes the fields as its arguments."""

    _make: ClassVar[Callable[..., Callable[[jax.Array], Any]]]

    def __call__(self, step: jax.Array) -> jax.Array:
        """The rate of a step."""
        rate: jax.Array = self._make(**dataclasses.asdict(self))(step)
        return rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantRate(_Schedule):
    """``value`` at every step."""

    _make = staticmethod(optax.constant_schedule)

    value: float
    """>= 0."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        _not_negative(self, "value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRate(_Schedule):
    """From ``init_value`` to ``end_value`` in a straight line."""

    _make = staticmethod(optax.linear_schedule)

    init_value: float
    """>= 0."""

    end_value: float
    """Kept from the end of the line on, >= 0."""

    transition_steps: int
    """Length of the line, >= 1."""

    transition_begin: int = 0
    """Step where it begins, >= 0."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        _not_negative(self, "init_value", "end_value", "transition_begin")
        _positive(self, "transition_steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CosineRate(_Schedule):
    """From ``init_value`` to ``alpha * init_value`` along half a cosine."""

    _make = staticmethod(optax.cosine_decay_schedule)

    init_value: float
    """>= 0."""

    decay_steps: int
    """Length of the decay, >= 1."""

    alpha: float = 0.0
    """Share of ``init_value`` kept at the end, >= 0."""

    exponent: float = 1.0
    """Of the cosine, > 0."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        _not_negative(self, "init_value", "alpha")
        _positive(self, "decay_steps", "exponent")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupCosineRate(_Schedule):
    """In a line from ``init_value`` to ``peak_value``, then along half a cosine to the end."""

    _make = staticmethod(optax.warmup_cosine_decay_schedule)

    init_value: float = 0.0
    """>= 0."""

    peak_value: float
    """>= 0."""

    warmup_steps: int
    """Length of the line, >= 1."""

    decay_steps: int
    """Length of line and cosine together, more than ``warmup_steps``."""

    end_value: float = 0.0
    """Kept from then on, >= 0."""

    exponent: float = 1.0
    """Of the cosine, > 0."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        _not_negative(self, "init_value", "end_value")
        _positive(self, "peak_value", "warmup_steps", "decay_steps", "exponent")
        if self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps counts the warm-up too, so it must be > warmup_steps = "
                f"{self.warmup_steps}, got {self.decay_steps}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExponentialRate(_Schedule):
    """``init_value * decay_rate ** (step / transition_steps)``."""

    _make = staticmethod(optax.exponential_decay)

    init_value: float
    """>= 0."""

    transition_steps: int
    """Steps in which the rate is multiplied by ``decay_rate`` once, >= 1."""

    decay_rate: float
    """> 0."""

    transition_begin: int = 0
    """Step where the decay begins, >= 0."""

    staircase: bool = False
    """Whether the rate changes every ``transition_steps`` only."""

    end_value: float | None = None
    """Where the decay ends, >= 0; default never."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        _not_negative(self, "init_value", "transition_begin", "end_value")
        _positive(self, "transition_steps", "decay_rate")


def _piecewise(
    init_value: float, boundaries: tuple[int, ...], scales: tuple[float, ...]
) -> Callable[[jax.Array], Any]:
    by_step = dict(zip(boundaries, scales, strict=True))
    schedule: Callable[[jax.Array], Any] = optax.piecewise_constant_schedule(init_value, by_step)
    return schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class PiecewiseRate(_Schedule):
    """``init_value``, multiplied by a scale at every boundary."""

    _make = staticmethod(_piecewise)

    init_value: float
    """>= 0."""

    boundaries: tuple[int, ...]
    """Steps, ascending, >= 1."""

    scales: tuple[float, ...]
    """A factor for each boundary, >= 0."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        _not_negative(self, "init_value")
        if len(self.boundaries) != len(self.scales):
            raise ValueError(
                f"boundaries and scales must be equally many, got {len(self.boundaries)} and "
                f"{len(self.scales)}"
            )
        if list(self.boundaries) != sorted({max(step, 1) for step in self.boundaries}):
            raise ValueError(f"boundaries must ascend from >= 1, got {list(self.boundaries)}")
        if min(self.scales, default=0.0) < 0:
            raise ValueError(f"scales must be >= 0, got {list(self.scales)}")
        for step in self.boundaries:
            _check_fits("boundaries", step)
        for scale in self.scales:
            _check_fits("scales", scale)


Rate = (
    float
    | Annotated[
        Any,
        one_of(
            constant=ConstantRate,
            linear=LinearRate,
            cosine=CosineRate,
            warmup_cosine=WarmupCosineRate,
            exponential=ExponentialRate,
            piecewise=PiecewiseRate,
        ),
    ]
)
"""A number, or a table with a key ``kind``."""


def _not_negative(rate: Any, *names: str) -> None:
    for name in names:
        value = getattr(rate, name)
        if value is not None and value < 0:
            raise ValueError(f"{name} must be >= 0, got {value:g}")
        if value is not None:
            _check_fits(name, value)


def _positive(rate: Any, *names: str) -> None:
    for name in names:
        value = getattr(rate, name)
        if value <= 0:
            raise ValueError(f"{name} must be > 0, got {value:g}")
        _check_fits(name, value)


def _check_fits(name: str, value: float) -> None:
    """Raises ValueError for what the device's int32 (steps) or float32 (rates) cannot hold."""
    if isinstance(value, int) and value >= STEPS_END:
        raise ValueError(f"{name} must be < {STEPS_END}, got {value}")
    if not abs(value) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{name} must be a float32, got {value:g}")
