# SPDX-License-Identifier: Apache-2.0
"""Groups equal rows on the device: owners merge what several devices ask of them."""

from __future__ import annotations

from typing import Literal

import jax

from jaxsparse.ops.native import library
from jaxsparse.ops.unique.cpu import unique_cpu
from jaxsparse.ops.unique.gpu import unique_triton
from jaxsparse.ops.unique.xla import unique_xla

__all__ = ["unique"]

Implementation = Literal["xla", "native", "triton"]


def unique(
    rows: jax.Array, num_rows: int, implementation: Implementation | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Groups equal rows, in the order they come in.

    Args:
        rows: ``[N]`` int32; what is outside [0, R) belongs to no group.
        num_rows: R.
        implementation: ``xla``, ``native``, ``triton``; None for the best on the default backend.

    Returns:
        Distinct rows ``[N]`` int32, ascending, padded with R; ``order [N]`` int32, places in
        ``rows`` grouped by row, those without a group last; ``offsets [N + 1]`` int32: group u is
        entries ``offsets[u]`` to ``offsets[u + 1]`` of ``order``, empty where there is no row.

    Raises:
        RuntimeError: ``native`` without the native library.
        ValueError: an unknown implementation.
    """
    if implementation is None:
        is_native = jax.default_backend() == "cpu" and library.is_available()
        implementation = "native" if is_native else "xla"
        if jax.default_backend() == "gpu":
            implementation = "triton"
    if implementation == "native":
        return unique_cpu(rows, num_rows)
    if implementation == "xla":
        return unique_xla(rows, num_rows)
    if implementation == "triton":
        return unique_triton(rows, num_rows)
    raise ValueError(
        f"unique: implementation must be xla, native, triton or None, got {implementation!r}"
    )
