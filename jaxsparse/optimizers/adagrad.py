# SPDX-License-Identifier: Apache-2.0
"""Adagrad with one accumulator per element."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxsparse.optimizers.accumulating import AccumulatingRule
from jaxsparse.optimizers.arithmetic import ratio_or_zero
from jaxsparse.optimizers.base import Slots


@dataclasses.dataclass(frozen=True)
class Adagrad(AccumulatingRule):
    """``accumulator += g**2; w -= lr * g / (sqrt(accumulator) + eps)``.

    Slot ``accumulator`` ``[R, D]`` float32. With ``eps=0`` an element whose accumulator is 0 does
    not move. Source: Duchi, Hazan, Singer, JMLR 12 (2011).

    >>> import jax.numpy as jnp
    >>> rule = Adagrad(0.5, initial_accumulator=0.0, eps=0.0)
    >>> w, g, lr = jnp.ones((1, 2)), jnp.float32([[0.0, 2.0]]), jnp.full((1, 1), 0.5)
    >>> w, slots = rule.update(w, rule.init_slots(1, 2), g, lr, jnp.int32(0))
    >>> w.tolist(), slots["accumulator"].tolist()
    ([[1.0, 0.5]], [[0.0, 4.0]])
    """

    def init_slots(self, num_rows: int, dim: int) -> Slots:
        """Slots of untouched rows; see `SparseOptimizer.init_slots`."""
        accumulator = jnp.full((num_rows, dim), self.initial_accumulator, jnp.float32)
        return {"accumulator": accumulator, **self._decay_slots(num_rows)}

    def update(
        self, w: jax.Array, slots: Slots, g: jax.Array, lr: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Slots]:
        """Moves distinct rows once; see `SparseOptimizer.update`."""
        w, new_slots, g = self._decay(w, slots, g, lr, step)
        accumulator = slots["accumulator"] + g * g
        w = w - lr * ratio_or_zero(g, jnp.sqrt(accumulator) + self.eps)
        return w, {"accumulator": accumulator, **new_slots}
