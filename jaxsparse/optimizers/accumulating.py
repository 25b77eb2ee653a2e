# SPDX-License-Identifier: Apache-2.0
"""What the Adagrad rules share: a sum of squared gradients that starts above zero."""

from __future__ import annotations

import dataclasses

from jaxsparse.optimizers.decay import DecayedRule


@dataclasses.dataclass(frozen=True)
class AccumulatingRule(DecayedRule):
    """Fields of a rule that divides by the root of a slot ``accumulator``."""

    initial_accumulator: float = 0.1
    """Accumulator of an untouched row, >= 0. Gradients of a mean loss shrink as 1 / batch size:
    from batches of some hundred on take a small one, such as 1e-8, or rows hardly move."""

    eps: float = 1e-8
    """Added to the root, >= 0."""

    def __post_init__(self) -> None:
        """Validates and normalises the fields."""
        super().__post_init__()
        self._check_number("initial_accumulator", at_least=0.0)
        self._check_number("eps", at_least=0.0)
