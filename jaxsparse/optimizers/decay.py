# SPDX-License-Identifier: Apache-2.0
"""Weight decay of the rows a step touches, shared by all rules but FTRL (which has its own l2).

Both decays come before the rule and start from the same ``w``::

    g += l2 * w                                 # l2: part of the gradient
    w -= learning_rate * weight_decay * w       # weight_decay: decoupled (arXiv 1711.05101)

Rows that a step does not touch keep their bits. With ``catch_up_decay`` a touched row also pays
for the steps at which it was absent: ``w *= (1 - learning_rate * weight_decay)**k`` with
``k = step - last_step``, the slot read before it is set to ``step``, and k = 1 for a row never
touched. All k factors use the current learning rate. If the step count was set back, k = 0 once.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxsparse.optimizers.base import Slots
from jaxsparse.optimizers.rule import Rule

NEVER = -1
"""``last_step`` of a row that was never touched."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecayedRule(Rule):
    """A rule with decay on touched rows; see the module's formulas."""

    l2: float = 0.0
    """Coefficient of the penalty ``l2 / 2 * |w|**2``, >= 0."""

    weight_decay: float = 0.0
    """Decoupled decay per step and unit of learning rate, >= 0."""

    catch_up_decay: bool = False
    """True also applies ``weight_decay`` for the steps since the row was last touched; costs a
    slot ``last_step`` ``[R]`` int32."""

    def __post_init__(self) -> None:
        """Validates and normalises the fields."""
        super().__post_init__()
        self._check_number("l2", at_least=0.0)
        self._check_number("weight_decay", at_least=0.0)
        self._check_flag("catch_up_decay")
        if self.catch_up_decay and self.weight_decay == 0.0:
            raise ValueError(
                f"{type(self).__name__}: catch_up_decay=True needs weight_decay > 0, got 0.0; "
                "only decoupled decay can be caught up, l2 cannot"
            )

    def _decay_slots(self, num_rows: int) -> Slots:
        """Slots decay needs: ``last_step`` ``[num_rows]`` int32, or none."""
        if not self.catch_up_decay:
            return {}
        return {"last_step": jnp.full((num_rows,), NEVER, jnp.int32)}

    def _decay(
        self, w: jax.Array, slots: Slots, g: jax.Array, lr: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Slots, jax.Array]:
        """Applies both decays; arguments as `SparseOptimizer.update`.

        Returns:
            Decayed ``w`` ``[U, D]``, decay's own new slots, and ``g`` ``[U, D]`` with its l2 term.
        """
        if self.l2 > 0.0:
            g = g + self.l2 * w
        if self.weight_decay == 0.0:
            return w, {}, g
        rate = lr * self.weight_decay
        if not self.catch_up_decay:
            return w - rate * w, {}, g
        last_step = slots["last_step"]
        num_steps = jnp.where(last_step == NEVER, 1, step - last_step)
        w = w + _change_after(rate, num_steps[:, None]) * w
        return w, {"last_step": jnp.full_like(last_step, step)}, g


def _change_after(rate: jax.Array, num_steps: jax.Array) -> jax.Array:
    """``(1 - rate)**num_steps - 1`` ``[U, 1]``, without first rounding ``1 - rate``.

    A rate above 1 decays to 0, never past it.
    """
    change = jnp.expm1(num_steps.astype(jnp.float32) * jnp.log1p(-jnp.minimum(rate, 1.0)))
    return jnp.where(num_steps > 0, change, 0.0)
