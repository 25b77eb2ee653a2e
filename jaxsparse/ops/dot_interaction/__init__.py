# SPDX-License-Identifier: Apache-2.0
"""DLRM's dots of all pairs of vectors, and their gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jaxsparse.ops.dot_interaction.cpu import dot_interaction_grads_native, dot_interaction_native
from jaxsparse.ops.dot_interaction.gpu import dot_interaction_grads_triton, dot_interaction_triton
from jaxsparse.ops.dot_interaction.xla import dot_interaction_grads_xla, dot_interaction_xla
from jaxsparse.ops.platforms import Implementation, run_on_platform

__all__ = ["dot_interaction"]

Vectors = tuple[jax.Array, ...]

_DOTS: dict[str, Implementation] = {
    "xla": dot_interaction_xla,
    "native": dot_interaction_native,
    "triton": dot_interaction_triton,
}
_GRADS: dict[str, Implementation] = {
    "xla": dot_interaction_grads_xla,
    "native": dot_interaction_grads_native,
    "triton": dot_interaction_grads_triton,
}


def dot_interaction(
    vectors: Sequence[jax.Array], *, implementation: str | None = None
) -> jax.Array:
    """Dot products of all pairs of distinct vectors, sample by sample.

    Kernels have gradients of any order in reverse mode; ``implementation="xla"`` has forward mode
    too.

    Args:
        vectors: F arrays ``[b, D]`` float32. Other floating dtypes run on XLA.
        implementation: ``xla``, ``native`` or ``triton``; None for the best.

    Returns:
        ``[b, F * (F - 1) / 2]``, the strict lower triangle row by row: the pairs (1, 0), (2, 0),
        (2, 1), (3, 0), ...

    Raises:
        ValueError: there are no vectors, shapes or dtypes differ, or there is no such
            implementation for the dtype.
        RuntimeError: the native one is asked for and is not there.

    Source: the interaction of Naumov et al. 2019, arXiv 1906.00091.

    >>> user, item = jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 4.0]])
    >>> dot_interaction([user, item, user]).tolist()
    [[11.0, 5.0, 11.0]]
    """
    arrays = tuple(map(jnp.asarray, vectors))
    _check(arrays)
    if arrays[0].dtype != jnp.float32:
        if implementation not in (None, "xla"):
            raise ValueError(
                f"dot_interaction: implementation {implementation!r} takes float32, got "
                f"{arrays[0].dtype}; cast the vectors, or use 'xla'"
            )
        implementation = "xla"
    if implementation == "xla":
        return dot_interaction_xla(arrays)
    return _dots(implementation, arrays)


def _check(arrays: Vectors) -> None:
    if not arrays:
        raise ValueError("dot_interaction: vectors is empty, expected at least one")
    kinds = {(array.shape, array.dtype.name) for array in arrays}
    if len(kinds) > 1 or arrays[0].ndim != 2:
        got = ", ".join(f"{dtype} {list(shape)}" for shape, dtype in sorted(kinds))
        raise ValueError(f"dot_interaction: vectors must be [b, D] and all alike, got {got}")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dots(implementation: str | None, vectors: Vectors) -> jax.Array:
    dots: jax.Array = run_on_platform("dot_interaction", implementation, _DOTS, vectors)
    return dots


def _dots_forward(implementation: str | None, vectors: Vectors) -> tuple[jax.Array, Vectors]:
    return _dots(implementation, vectors), vectors


def _dots_backward(
    implementation: str | None, vectors: Vectors, grads: jax.Array
) -> tuple[Vectors]:
    return (_grads(implementation, grads, vectors),)


_dots.defvjp(_dots_forward, _dots_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grads(implementation: str | None, grads: jax.Array, vectors: Vectors) -> Vectors:
    found: Vectors = run_on_platform("dot_interaction", implementation, _GRADS, grads, vectors)
    return found


def _grads_forward(
    implementation: str | None, grads: jax.Array, vectors: Vectors
) -> tuple[Vectors, tuple[jax.Array, Vectors]]:
    return _grads(implementation, grads, vectors), (grads, vectors)


def _grads_backward(
    implementation: str | None, saved: tuple[jax.Array, Vectors], seeds: Vectors
) -> tuple[jax.Array, Vectors]:
    """Second derivatives: rare, so XLA's."""
    del implementation
    _, pull_back = jax.vjp(dot_interaction_grads_xla, *saved)
    grads, vectors = pull_back(seeds)
    return grads, vectors


_grads.defvjp(_grads_forward, _grads_backward)
