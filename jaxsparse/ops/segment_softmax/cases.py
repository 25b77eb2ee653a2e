# SPDX-License-Identifier: Apache-2.0
"""Segments to try the softmax with."""

from __future__ import annotations

import numpy as np

LENGTHS: dict[str, list[int]] = {
    "one": [1],
    "empty": [0, 0],
    "mixed": [3, 0, 1, 16, 17, 0, 40, 2],
    "edges": [255, 256, 257, 512],
    "long": [0, 5000, 3],
    "many": [5] * 200,
}
"""Lengths of the segments by name."""

PADDING = 7
"""Scores behind the last segment."""


def draw_segments(name: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Scores ``[N]`` float32 of very different sizes, some -inf, and offsets ``[B + 1]`` int32."""
    offsets = np.cumsum([0, *LENGTHS[name]]).astype(np.int32)
    scores = rng.normal(size=offsets[-1] + PADDING).astype(np.float32)
    scores *= rng.choice(np.array([1e-3, 1, 30, 3e37], np.float32), scores.size)
    scores[rng.random(scores.size) < 0.1] = -np.inf
    return scores, offsets
