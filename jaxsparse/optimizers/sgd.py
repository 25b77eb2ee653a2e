# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient descent."""

from __future__ import annotations

import dataclasses

import jax

from jaxsparse.optimizers.base import Slots
from jaxsparse.optimizers.decay import DecayedRule


@dataclasses.dataclass(frozen=True)
class SGD(DecayedRule):
    """``w -= lr * g``. No slots of its own.

    >>> import jax.numpy as jnp
    >>> w, g, lr = jnp.ones((1, 2)), jnp.float32([[0.0, 1.0]]), jnp.full((1, 1), 0.5)
    >>> SGD(0.5).update(w, {}, g, lr, jnp.int32(0))[0].tolist()
    [[1.0, 0.5]]
    """

    def init_slots(self, num_rows: int, dim: int) -> Slots:
        """Slots of untouched rows; see `SparseOptimizer.init_slots`."""
        del dim
        return self._decay_slots(num_rows)

    def update(
        self, w: jax.Array, slots: Slots, g: jax.Array, lr: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Slots]:
        """Moves distinct rows once; see `SparseOptimizer.update`."""
        w, new_slots, g = self._decay(w, slots, g, lr, step)
        return w - lr * g, new_slots
