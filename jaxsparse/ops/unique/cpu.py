# SPDX-License-Identifier: Apache-2.0
"""`unique` in C++: a radix sort of (row, place) words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.ops.native import library

HANDLERS = ("jaxsparse_unique",)
"""XLA handlers of `cpu.cc`."""


def unique_cpu(rows: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Groups equal rows; see `jaxsparse.ops.unique.unique`.

    Raises:
        RuntimeError: the native library is not there.
    """
    library.load()
    size = rows.shape[0]
    shapes = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (size, size, size + 1)]
    distinct, order, offsets = jax.ffi.ffi_call(HANDLERS[0], shapes, vmap_method="sequential")(
        rows, num_rows=np.int64(num_rows)
    )
    return distinct, order, offsets
