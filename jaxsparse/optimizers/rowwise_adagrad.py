# SPDX-License-Identifier: Apache-2.0
"""Adagrad with one accumulator per row."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxsparse.optimizers.accumulating import AccumulatingRule
from jaxsparse.optimizers.arithmetic import ratio_or_zero
from jaxsparse.optimizers.base import Slots


@dataclasses.dataclass(frozen=True)
class RowwiseAdagrad(AccumulatingRule):
    """``accumulator += mean(g**2); w -= lr * g / (sqrt(accumulator) + eps)``.

    Slot ``accumulator`` ``[R]`` float32: D times less memory than `Adagrad`, whose result it
    equals at D = 1. With ``eps=0`` a row whose accumulator is 0 does not move.

    >>> import jax.numpy as jnp
    >>> rule = RowwiseAdagrad(1.0, initial_accumulator=0.0, eps=0.0)
    >>> w, g, lr = jnp.zeros((1, 4)), jnp.float32([[0.0, 0.0, 0.0, 2.0]]), jnp.ones((1, 1))
    >>> w, slots = rule.update(w, rule.init_slots(1, 4), g, lr, jnp.int32(0))
    >>> w.tolist(), slots["accumulator"].tolist()
    ([[0.0, 0.0, 0.0, -2.0]], [1.0])
    """

    def init_slots(self, num_rows: int, dim: int) -> Slots:
        """Slots of untouched rows; see `SparseOptimizer.init_slots`."""
        del dim
        accumulator = jnp.full((num_rows,), self.initial_accumulator, jnp.float32)
        return {"accumulator": accumulator, **self._decay_slots(num_rows)}

    def update(
        self, w: jax.Array, slots: Slots, g: jax.Array, lr: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Slots]:
        """Moves distinct rows once; see `SparseOptimizer.update`."""
        return self.update_padded(w, slots, g, lr, step, dim=g.shape[-1])

    def update_padded(
        self, w: jax.Array, slots: Slots, g: jax.Array, lr: jax.Array, step: jax.Array, *, dim: int
    ) -> tuple[jax.Array, Slots]:
        """`update` of rows with columns of zeros past the first ``dim``, as kernels hold them."""
        w, new_slots, g = self._decay(w, slots, g, lr, step)
        accumulator = slots["accumulator"] + jnp.sum(g * g, axis=-1) / dim
        w = w - lr * ratio_or_zero(g, jnp.sqrt(accumulator)[:, None] + self.eps)
        return w, {"accumulator": accumulator, **new_slots}
