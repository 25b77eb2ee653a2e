# SPDX-License-Identifier: Apache-2.0
"""FTRL-proximal."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxsparse.optimizers.arithmetic import ratio_or_zero
from jaxsparse.optimizers.base import Slots
from jaxsparse.optimizers.rule import Rule


@dataclasses.dataclass(frozen=True)
class Ftrl(Rule):
    """FTRL-proximal per element, without shrinkage.

    ``sigma = (sqrt(n + g**2) - sqrt(n)) / lr; z += g - sigma*w; n += g**2; w = 0`` where
    ``|z| <= l1``, else ``-(z - sign(z)*l1) / ((beta + sqrt(n)) / lr + l2)``.

    The row is computed from ``z`` and ``n``, so with ``beta`` > 0 the first touch pulls an initial
    row towards 0: initialise FTRL tables with 0 if that is not wanted. Where the denominator is 0
    (``beta = l2 = 0`` and no gradient yet), and while the learning rate is 0, nothing moves.

    Slots ``z``, ``n`` ``[R, D]`` float32. Source: McMahan et al., "Ad click prediction: a view
    from the trenches", KDD 2013, algorithm 1.

    >>> import jax.numpy as jnp
    >>> rule = Ftrl(0.5, beta=0.0)
    >>> w, g, lr = jnp.zeros((1, 2)), jnp.float32([[0.0, 2.0]]), jnp.full((1, 1), 0.5)
    >>> w, slots = rule.update(w, rule.init_slots(1, 2), g, lr, jnp.int32(0))
    >>> w.tolist(), slots["n"].tolist()
    ([[0.0, -0.5]], [[0.0, 4.0]])
    """

    beta: float = 1.0
    """Added to the root of ``n``, >= 0."""

    l1: float = 0.0
    """Elements with ``|z| <= l1`` are exactly 0; >= 0."""

    l2: float = 0.0
    """Proximal l2 of the formula (not a term of the gradient), >= 0."""

    def __post_init__(self) -> None:
        """Validates and normalises the fields."""
        super().__post_init__()
        for field in ("beta", "l1", "l2"):
            self._check_number(field, at_least=0.0)

    def init_slots(self, num_rows: int, dim: int) -> Slots:
        """Slots of untouched rows; see `SparseOptimizer.init_slots`."""
        return {name: jnp.zeros((num_rows, dim), jnp.float32) for name in ("z", "n")}

    def update(
        self, w: jax.Array, slots: Slots, g: jax.Array, lr: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Slots]:
        """Moves distinct rows once; see `SparseOptimizer.update`."""
        del step
        z, n = slots["z"], slots["n"]
        root, n_new = jnp.sqrt(n), n + g * g
        root_new = jnp.sqrt(n_new)
        # sqrt(n + g**2) - sqrt(n) without its cancellation.
        sigma = ratio_or_zero(g * g, lr * (root_new + root))
        z_new = z + g - sigma * w
        # Numerator and denominator times lr: fewer roundings than the written form.
        denominator = self.beta + root_new + self.l2 * lr
        shrunk = jnp.sign(z_new) * jnp.maximum(jnp.abs(z_new) - self.l1, 0.0)
        # `!=`, because NaN has to come through.
        w_new = jnp.where(denominator != 0, -lr * ratio_or_zero(shrunk, denominator), w)
        old, new = (w, z, n), (w_new, z_new, n_new)
        w, z, n = (jnp.where(lr != 0, b, a) for a, b in zip(old, new, strict=True))
        return w, {"z": z, "n": n}
