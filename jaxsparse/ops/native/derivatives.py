# SPDX-License-Identifier: Apache-2.0
"""Derivatives of kernels: those of the same operation on XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def derived_from(xla: Callable[..., Any], native: Callable[..., Any]) -> Callable[..., Any]:
    """``native``, whose derivatives (forward and reverse) are ``xla``'s.

    The step does without: its sparse half is written out. This is for whoever differentiates a
    lookup like any function.

    Args:
        xla: of arrays, None, or pytrees of them.
        native: means the same.
    """

    @jax.custom_jvp
    def run(*args: Any) -> Any:
        return native(*args)

    @run.defjvp
    def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        return run(*primals), jax.jvp(xla, primals, tangents)[1]

    return run
