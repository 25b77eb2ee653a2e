# SPDX-License-Identifier: Apache-2.0
"""What the sums by segment mean: along levels, by group, and of bags' gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt


def segment_sum_reference(values: jax.Array, segments: jax.Array, num_segments: int) -> jax.Array:
    """Sums ``values [N, D]`` whose segment is s into row s; other segments are left out.

    Args:
        values: ``[N, D]`` float32.
        segments: ``[N]`` int32; values outside ``[0, num_segments)`` add nowhere.
        num_segments: number of rows of the result.

    Returns:
        ``[num_segments, D]`` float32.
    """
    member = segments[None, :] == jnp.arange(num_segments, dtype=segments.dtype)[:, None]
    return jnp.where(member[:, :, None], values[None], 0).sum(axis=1)


def grouped_sum_reference(
    values: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int32],
    order: npt.NDArray[np.int32] | None = None,
) -> npt.NDArray[np.float64]:
    """Sums rows by group: ``out[k] = sum of values[order[j]], offsets[k] <= j < offsets[k + 1]``.

    Args:
        values: ``[N, D]`` float32.
        offsets: ``[K + 1]`` ascending.
        order: ``[M]`` row of each entry; one outside ``[0, N)`` adds nothing. None: row j.

    Returns:
        ``[K, D]`` float64.
    """
    if order is None:
        order = np.arange(values.shape[0], dtype=np.int32)
    return bag_gradients_reference([values], offsets, order)


def bag_gradients_reference(
    grads: Sequence[npt.NDArray[np.float32]],
    offsets: npt.NDArray[np.int32],
    bags: npt.NDArray[np.int32],
    ids: npt.NDArray[np.int32] | None = None,
    weights: npt.NDArray[np.float32] | None = None,
    scale: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float64]:
    """The transpose of `embedding_bag`: gradients of bags, summed by distinct row.

    Group k is entries ``offsets[k] .. offsets[k + 1]`` of ``bags``, one an id; it sums
    ``weights[ids[j]] * scale[bags[j]] * grads[bags[j]]``.

    Args:
        grads: arrays ``[parts_f, D]`` whose concatenation is ``[O, D]``, gradients of bags.
        offsets: ``[K + 1]`` ascending.
        bags: ``[M]`` bag of each entry; one outside ``[0, O)`` adds nothing.
        ids: ``[M]`` id of each entry, where there are weights.
        weights: by id; an id outside of it has weight 0. None means 1.
        scale: ``[O]`` by bag; None means 1.

    Returns:
        ``[K, D]`` float64.
    """
    by_bag = np.concatenate(grads).astype(np.float64)
    sums = np.zeros((offsets.size - 1, by_bag.shape[1]))
    for group, (start, stop) in enumerate(pairwise(offsets.tolist())):
        for entry in range(start, stop):
            bag = int(bags[entry])
            if not 0 <= bag < by_bag.shape[0]:
                continue
            factor = 1.0 if scale is None else float(scale[bag])
            if weights is not None and ids is not None:
                index = int(ids[entry])
                factor *= float(weights[index]) if 0 <= index < weights.size else 0.0
            sums[group] += factor * by_bag[bag]
    return sums
