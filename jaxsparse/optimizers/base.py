# SPDX-License-Identifier: Apache-2.0
"""What a sparse optimizer is: two pure functions on the distinct rows a step touches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax

Slots = dict[str, jax.Array]
"""Slot variables by name: each ``[R, D]`` or ``[R]``, float32 or int32."""

Schedule = Callable[[jax.Array], jax.Array]
"""An optax schedule: global step (int32 scalar, 0 is the first update) to learning rate."""


@runtime_checkable
class SparseOptimizer(Protocol):
    """A rule that moves rows. A user's own rule is a frozen dataclass with these members.

    A rule may have a ``learning_rate``, a float or a schedule; without one it is given 1. Its
    float value lives in `EmbeddingState.learning_rates`, so two rules that differ in it alone
    share compiled programs (in the rules shipped here the field takes no part in comparison).
    """

    def init_slots(self, num_rows: int, dim: int) -> Slots:
        """Slots of ``num_rows`` rows that were never touched; every row alike."""
        ...

    def update(
        self, w: jax.Array, slots: Slots, g: jax.Array, lr: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Slots]:
        """Moves ``U`` distinct rows once.

        Args:
            w: ``[U, D]`` float32, rows before the update.
            slots: their slots, ``[U, D]`` or ``[U]`` each.
            g: ``[U, D]`` float32, the summed gradient of all occurrences of each row.
            lr: ``[U, 1]`` float32, learning rate of each row's table.
            step: int32 scalar, global step; 0 is the first update.

        Returns:
            New rows ``[U, D]`` and new slots, same names, shapes and dtypes.
        """
        ...


def rate_of(rule: SparseOptimizer) -> float | Schedule:
    """The rate a rule's tables start with, or its schedule of the global step."""
    rate: float | Schedule = getattr(rule, "learning_rate", 1.0)
    return rate
