# SPDX-License-Identifier: Apache-2.0
"""One operation, several implementations: the one that is asked for, or the platform's best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxsparse.ops.native import library

Implementation = Callable[..., Any]

PLATFORMS = {"native": "cpu", "triton": "cuda"}
"""Platform each kernel is for; ``xla`` is for all."""


def run_on_platform(
    op: str, implementation: str | None, kernels: Mapping[str, Implementation], *args: Any
) -> Any:
    """Calls one of ``kernels``, which all mean the same.

    The platform is that which the program is lowered for, not the one this process computes on.

    Args:
        op: name of the operation, for messages.
        implementation: a key of ``kernels``, which then runs on its platform only; None for the
            best: the kernel of the platform where there is one, else ``xla``.
        kernels: functions of ``args`` by name: ``xla``, ``native``, ``triton``.
        args: arrays, or pytrees of them.

    Raises:
        ValueError: there is no such implementation.
        RuntimeError: the native one is asked for and was not compiled; says why.
    """
    if implementation is None:
        best = {PLATFORMS[name]: run for name, run in kernels.items() if name in PLATFORMS}
        if "cpu" in best and not library.is_available():
            del best["cpu"]
        if jax.default_backend() != "gpu":
            # Tracing a Pallas kernel takes longer than all else here. Who compiles for GPUs that
            # are not there asks for "triton".
            best.pop(PLATFORMS["triton"], None)
        branches = {platform: _varying(run) for platform, run in best.items()}
        return jax.lax.platform_dependent(*args, default=_varying(kernels["xla"]), **branches)
    if implementation not in kernels:
        known = ", ".join(map(repr, sorted(kernels)))
        raise ValueError(
            f"{op}: there is no implementation {implementation!r}, expected one of {known}, or "
            "None for the best"
        )
    if implementation == "native" and (why := library.why_not()) is not None:
        raise RuntimeError(f"{op}: implementation 'native' is not there: {why}")
    return _varying(kernels[implementation])(*args)


def _varying(run: Implementation) -> Implementation:
    """Names what jax cannot see: a kernel's results vary over the mesh as its arguments do."""

    def same(*args: Any) -> Any:
        axes = frozenset().union(*map(varying_axes, jax.tree.leaves(args)))

        def cast(result: jax.Array) -> jax.Array:
            missing = tuple(sorted(axes - varying_axes(result)))
            return jax.lax.pcast(result, missing, to="varying") if missing else result

        return jax.tree.map(cast, run(*args))

    return same


def varying_axes(array: jax.Array) -> frozenset[str]:
    """Mesh axes that an array inside a ``shard_map`` which checks them varies over."""
    kind: Any = jax.typeof(array)
    # The attribute has been renamed in jax.
    return frozenset(kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying)
