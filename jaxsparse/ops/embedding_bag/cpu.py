# SPDX-License-Identifier: Apache-2.0
"""`embedding_bag` on the CPU, in C++."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.ops.native.arguments import or_empty, presence

HANDLERS = ("jaxsparse_embedding_bag",)


def embedding_bag_native(
    parts: tuple[int, ...],
    table: jax.Array,
    rows: jax.Array | None,
    slots: jax.Array,
    offsets: jax.Array | None,
    weights: jax.Array | None,
    scale: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """`embedding_bag` by the kernel; the library is loaded."""
    shapes = [jax.ShapeDtypeStruct((part, table.shape[1]), jnp.float32) for part in parts]
    pooled = jax.ffi.ffi_call(HANDLERS[0], shapes, vmap_method="sequential")(
        table,
        or_empty(rows, np.int32),
        slots,
        or_empty(offsets, np.int32),
        or_empty(weights, np.float32),
        or_empty(scale, np.float32),
        present=presence(rows, offsets, weights, scale),
    )
    return tuple(pooled)
