# SPDX-License-Identifier: Apache-2.0
"""What `row_update` and `count_not_finite` mean: read the rows, ask the rule, write them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxsparse.ops.quantize.reference import stochastic_round_bf16_reference

Arrays = dict[str, npt.NDArray[Any]]


def row_update_reference(
    rule: Any,
    slab: npt.NDArray[Any],
    slots: Arrays,
    rows: npt.NDArray[np.int32],
    grads: npt.NDArray[np.float32],
    rates: npt.NDArray[np.float32],
    step: int,
    enabled: bool = True,
    noise_rows: npt.NDArray[np.uint32] | None = None,
    seed: int = 0,
) -> tuple[npt.NDArray[Any], Arrays]:
    """Moves distinct rows once by a rule's own ``update``.

    Args:
        rule: a `SparseOptimizer`.
        slab: ``[R, D]`` float32 or bfloat16.
        slots: by name ``[R, D]`` or ``[R]``.
        rows: ``[K]`` distinct; those outside ``[0, R)`` stand for nothing.
        grads: ``[K, D]``.
        rates: ``[K]`` learning rate of each row.
        step: global step.
        enabled: False changes nothing.
        noise_rows: ``[K]`` what the rounding of a bfloat16 row depends on; None takes ``rows``.
        seed: of that rounding.

    Returns:
        The new slab and slots; the arguments stay as they are.
    """
    slab, slots = slab.copy(), {name: array.copy() for name, array in slots.items()}
    inside = (rows >= 0) & (rows < slab.shape[0])
    if not enabled or not inside.any():
        return slab, slots
    at = rows[inside]
    old = {name: jnp.asarray(array[at]) for name, array in slots.items()}
    moved, new = jax.jit(rule.update)(
        jnp.asarray(slab[at].astype(np.float32)),
        old,
        jnp.asarray(grads[inside]),
        jnp.asarray(rates[inside][:, None]),
        jnp.int32(step),
    )
    noise = (rows if noise_rows is None else noise_rows)[inside]
    slab[at] = _stored(np.asarray(moved), slab.dtype, noise, seed, step)
    for name in slots:
        slots[name][at] = np.asarray(new[name])
    return slab, slots


def _stored(
    values: npt.NDArray[np.float32], dtype: Any, noise: npt.NDArray[Any], seed: int, step: int
) -> npt.NDArray[Any]:
    if dtype == np.float32:
        return values
    return stochastic_round_bf16_reference(values, noise, seed, step)


def count_not_finite_reference(
    rule: Any,
    slab: npt.NDArray[Any],
    slots: Arrays,
    rows: npt.NDArray[np.int32],
    *args: Any,
    **kwargs: Any,
) -> int:
    """Touched rows whose weights or slots `row_update_reference` would leave not finite.

    Args:
        rule: as there, like all others.
        slab: ``[R, D]``.
        slots: by name.
        rows: ``[K]``.
        args: the further arguments of `row_update_reference`.
        kwargs: the same by name.
    """
    moved, new = row_update_reference(rule, slab, slots, rows, *args, **kwargs)
    inside = rows[(rows >= 0) & (rows < slab.shape[0])]
    bad = np.zeros(inside.size, bool)
    for array in (moved, *new.values()):
        good = np.isfinite(array[inside].astype(np.float32))
        bad |= ~good.all(axis=tuple(range(1, good.ndim)))
    return int(bad.sum())
