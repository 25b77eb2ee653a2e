# SPDX-License-Identifier: Apache-2.0
"""Adam in its lazy mode."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxsparse.optimizers.arithmetic import one_minus_power, ratio_or_zero
from jaxsparse.optimizers.base import Slots
from jaxsparse.optimizers.decay import DecayedRule


@dataclasses.dataclass(frozen=True)
class Adam(DecayedRule):
    """Adam, mode **lazy**: a row absent from a step keeps weights and moments, bit for bit.

    ``m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g**2;
    w -= lr * (m / (1-b1**t)) / (sqrt(v / (1-b2**t)) + eps)``, with t the global step + 1, or with
    ``per_row_count`` the number of updates of the row, this one included. A row first touched
    late moves further by the global step (2.5 times lr at step 1,000 with g = 1 and the default
    betas) than by its own count (lr). The dense mode, which moves untouched rows, is not offered:
    it costs a pass over the table per step.

    Slots ``m``, ``v`` ``[R, D]`` float32, and ``count`` ``[R]`` int32 with ``per_row_count``.
    Source: Kingma, Ba, arXiv 1412.6980.

    >>> import jax.numpy as jnp
    >>> rule = Adam(0.5, eps=0.0)
    >>> w, g, lr = jnp.ones((1, 2)), jnp.float32([[0.0, 2.0]]), jnp.full((1, 1), 0.5)
    >>> w, slots = rule.update(w, rule.init_slots(1, 2), g, lr, jnp.int32(0))
    >>> [round(x, 5) for x in w[0].tolist()], sorted(slots)
    ([1.0, 0.5], ['m', 'v'])
    """

    b1: float = 0.9
    """Decay of the first moment, in [0, 1)."""

    b2: float = 0.999
    """Decay of the second moment, in [0, 1)."""

    eps: float = 1e-8
    """Added to the root, outside of it, >= 0."""

    per_row_count: bool = False
    """True corrects bias by the row's own number of updates."""

    def __post_init__(self) -> None:
        """Validates and normalises the fields."""
        super().__post_init__()
        self._check_number("b1", at_least=0.0, below=1.0)
        self._check_number("b2", at_least=0.0, below=1.0)
        self._check_number("eps", at_least=0.0)
        self._check_flag("per_row_count")

    def init_slots(self, num_rows: int, dim: int) -> Slots:
        """Slots of untouched rows; see `SparseOptimizer.init_slots`."""
        slots = {name: jnp.zeros((num_rows, dim), jnp.float32) for name in ("m", "v")}
        if self.per_row_count:
            slots["count"] = jnp.zeros((num_rows,), jnp.int32)
        return {**slots, **self._decay_slots(num_rows)}

    def update(
        self, w: jax.Array, slots: Slots, g: jax.Array, lr: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Slots]:
        """Moves distinct rows once; see `SparseOptimizer.update`."""
        w, new_slots, g = self._decay(w, slots, g, lr, step)
        if self.per_row_count:
            new_slots["count"] = slots["count"] + 1
            count = new_slots["count"][:, None]
        else:
            count = (step + 1).reshape(1, 1)
        m = self.b1 * slots["m"] + (1.0 - self.b1) * g
        v = self.b2 * slots["v"] + (1.0 - self.b2) * (g * g)
        mean = m / one_minus_power(self.b1, count)
        root = jnp.sqrt(v / one_minus_power(self.b2, count))
        w = w - lr * ratio_or_zero(mean, root + self.eps)
        return w, {"m": m, "v": v, **new_slots}
