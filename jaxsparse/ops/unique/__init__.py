# SPDX-License-Identifier: Apache-2.0
"""Groups equal rows on the device: owners merge what several devices ask of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxsparse.ops.platforms import run_on_platform
from jaxsparse.ops.shapes import Shapes
from jaxsparse.ops.unique.cpu import unique_cpu
from jaxsparse.ops.unique.gpu import unique_triton
from jaxsparse.ops.unique.xla import unique_xla

__all__ = ["unique"]

Groups = tuple[jax.Array, jax.Array, jax.Array]


def unique(rows: jax.Array, num_rows: int, *, implementation: str | None = None) -> Groups:
    """Groups equal rows, in the order they come in.

    Args:
        rows: ``[N]`` int32; what is outside [0, R) belongs to no group.
        num_rows: R, below 2**31.
        implementation: ``xla``, ``native`` or ``triton``; None for the best.

    Returns:
        Distinct rows ``[N]`` int32, ascending, padded with R; ``order [N]`` int32, places in
        ``rows`` grouped by row, those without a group last; ``offsets [N + 1]`` int32: group u is
        entries ``offsets[u]`` to ``offsets[u + 1]`` of ``order``, empty where there is no row.

    Raises:
        ValueError: shape or dtype is another, R does not fit int32, or there is no such
            implementation.
        RuntimeError: the native one is asked for and is not there.
    """
    rows = jnp.asarray(rows)
    Shapes("unique").check("rows", rows, "N", jnp.int32)
    if not 0 <= num_rows < 2**31:
        raise ValueError(f"unique: num_rows must be in [0, 2**31), got {num_rows}")
    kernels = {
        "xla": partial(_called, unique_xla, num_rows),
        "native": partial(_called, unique_cpu, num_rows),
        "triton": partial(_called, unique_triton, num_rows),
    }
    found: Groups = run_on_platform("unique", implementation, kernels, rows)
    return found


def _called(kernel: Callable[[jax.Array, int], Groups], num_rows: int, rows: jax.Array) -> Groups:
    return kernel(rows, num_rows)
