# SPDX-License-Identifier: Apache-2.0
"""What every shipped rule has: a learning rate, and checks of its hyper-parameters."""

from __future__ import annotations

import dataclasses
import math
import numbers

from jaxsparse.optimizers.base import Schedule


@dataclasses.dataclass(frozen=True)
class Rule:
    """Learning rate of a rule and how rules compare.

    Rules that differ in a float rate alone are equal (the value is a traced leaf of the state),
    rules with different schedules are not: a schedule is code of the compiled program.
    """

    learning_rate: float | Schedule = dataclasses.field(compare=False)
    """Rate the state starts with, >= 0, or a schedule of the global step."""

    schedule: Schedule | None = dataclasses.field(init=False, repr=False)
    """``learning_rate`` where it is a schedule, else None; derived, takes part in comparison."""

    def __post_init__(self) -> None:
        """Validates and normalises the fields."""
        if callable(self.learning_rate):
            object.__setattr__(self, "schedule", self.learning_rate)
            return
        self._check_number("learning_rate", at_least=0.0, also=" or a schedule of the int32 step")
        object.__setattr__(self, "schedule", None)

    def _check_number(
        self, field: str, *, at_least: float, below: float = math.inf, also: str = ""
    ) -> None:
        """Makes ``field`` a Python float, or raises naming class, field, range and value."""
        value = getattr(self, field)
        expected = f"a finite float >= {at_least:g}" + (
            f" and < {below:g}" if below < math.inf else ""
        )
        text = f"{type(self).__name__}: {field} must be {expected}{also}, got {value!r}"
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise TypeError(text)
        number = float(value)
        if not at_least <= number < below:
            raise ValueError(text)
        object.__setattr__(self, field, number)

    def _check_flag(self, field: str) -> None:
        """Raises where ``field`` is not a bool."""
        value = getattr(self, field)
        if not isinstance(value, bool):
            raise TypeError(f"{type(self).__name__}: {field} must be True or False, got {value!r}")
