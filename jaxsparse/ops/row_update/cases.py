# SPDX-License-Identifier: Apache-2.0
"""Rules, shapes and distributions that `row_update` is tested and timed with."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxsparse.optimizers import SGD, Adagrad, Adam, Ftrl, RowwiseAdagrad


@dataclasses.dataclass(frozen=True)
class HeavyBall:
    """A rule that no kernel knows."""

    learning_rate: float = 0.1

    def init_slots(self, num_rows: int, dim: int) -> dict[str, jax.Array]:
        """A velocity per element and a count per row."""
        count = jnp.zeros((num_rows,), jnp.int32)
        return {"count": count, "velocity": jnp.full((num_rows, dim), 0.125, jnp.float32)}

    def update(
        self, w: jax.Array, slots: dict[str, jax.Array], g: jax.Array, lr: jax.Array, step: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Momentum of one half."""
        velocity = 0.5 * slots["velocity"] + g
        return w - lr * velocity, {"count": slots["count"] + 1, "velocity": velocity}


RULES: dict[str, Any] = {
    "sgd": SGD(0.1),
    "sgd_decay": SGD(0.1, l2=0.01, weight_decay=0.02),
    "sgd_catch_up": SGD(0.1, weight_decay=0.02, catch_up_decay=True),
    "adagrad": Adagrad(0.1),
    "adagrad_of_zeros": Adagrad(0.1, initial_accumulator=0.0, eps=0.0),
    "adagrad_decay": Adagrad(0.1, l2=0.01, weight_decay=0.02, catch_up_decay=True),
    "rowwise_adagrad": RowwiseAdagrad(0.1),
    "rowwise_of_zeros": RowwiseAdagrad(0.1, initial_accumulator=0.0, eps=0.0),
    "rowwise_decay": RowwiseAdagrad(0.1, l2=0.01, weight_decay=0.02, catch_up_decay=True),
    "adam": Adam(0.1),
    "adam_of_zeros": Adam(0.1, b1=0.0, b2=0.0, eps=0.0),
    "adam_per_row": Adam(0.1, per_row_count=True, l2=0.01),
    "adam_decay": Adam(0.1, weight_decay=0.02, catch_up_decay=True, per_row_count=True),
    "ftrl": Ftrl(0.1),
    "ftrl_sparse": Ftrl(0.1, beta=0.5, l1=0.05, l2=0.1),
    "ftrl_of_zeros": Ftrl(0.1, beta=0.0),
    "heavy_ball": HeavyBall(),
}
"""Every shipped rule with and without its options, and one that is not shipped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateCase:
    """One call: sizes, how many rows are touched, and values that a rule must not trip over."""

    num_rows: int = 60
    """R."""
    dim: int = 16
    """D."""
    touched: int = 25
    """Distinct rows."""
    padding: int = 7
    """Entries behind them that stand for no row."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    extremes: bool = False
    """Whether zeros, infinities, NaNs and huge values are among gradients, rows and slots."""
    step: int = 3

    def arguments(self, rule: Any, seed: int = 0) -> dict[str, Any]:
        """Arguments by name, as `row_update_reference` takes them, but for ``enabled``."""
        rng = np.random.default_rng(seed)
        shape = (self.touched + self.padding, self.dim)
        slab = rng.normal(size=(self.num_rows, self.dim)).astype(np.float32)
        grads = rng.normal(size=shape).astype(np.float32)
        grads[rng.random(shape) < 0.1] = 0
        if self.extremes:
            odd = np.array([0, -0.0, np.inf, np.nan, 3e38, -3e38, 1e-40, 1e30], np.float32)
            for array in (slab, grads):
                hit = np.flatnonzero(rng.random(array.shape[0]) < 0.3)
                array[hit, rng.integers(0, self.dim)] = rng.choice(odd, hit.size)
        rows = np.full(shape[0], self.num_rows, np.int32)
        rows[: self.touched] = np.sort(rng.permutation(self.num_rows)[: self.touched])
        return {
            "rule": rule,
            "slab": slab.astype(ml_dtypes.bfloat16) if self.dtype == "bfloat16" else slab,
            "slots": self._slots(rng, rule),
            "rows": rows,
            "grads": grads,
            "rates": rng.choice(np.array([0.1, 0.05, 0.0, 2.0], np.float32), shape[0]),
            "step": self.step,
        }

    def _slots(self, rng: np.random.Generator, rule: Any) -> dict[str, Any]:
        """Initial slots, moved on for every other row; second moments stay >= 0."""
        slots = {}
        for name, initial in rule.init_slots(self.num_rows, self.dim).items():
            array = np.array(initial)
            used = array[::2]
            if array.dtype == np.int32:
                array[::2] = rng.integers(0, self.step + 2, used.shape)
            elif name in ("accumulator", "v", "n"):
                array[::2] += rng.random(used.shape, np.float32)
            else:
                array[::2] += rng.normal(size=used.shape).astype(np.float32)
            slots[name] = array
        return slots


CASES: dict[str, UpdateCase] = {
    "plain": UpdateCase(),
    "narrow": UpdateCase(dim=1, num_rows=300, touched=200),
    "odd": UpdateCase(dim=37),
    "wide": UpdateCase(dim=1024, num_rows=5, touched=3, padding=1),
    "none_touched": UpdateCase(touched=0),
    "first_step": UpdateCase(step=0, dim=3),
    "extremes": UpdateCase(extremes=True, dim=19),
    "bfloat16": UpdateCase(dtype="bfloat16", dim=35),
    "bfloat16_extremes": UpdateCase(dtype="bfloat16", extremes=True, dim=8),
}
"""Small ones, for tests."""


TIMED: dict[str, UpdateCase] = {
    f"dim {dim}": UpdateCase(num_rows=2_600_000, dim=dim, touched=40_000, padding=10_000)
    for dim in (16, 64)
}
"""Large ones, for benchmarks: rows that batch 4096 of 26 features touches at Zipf 1.2."""
