# SPDX-License-Identifier: Apache-2.0
"""Shapes to try the dots with."""

from __future__ import annotations

SHAPES = {
    "one_vector": (3, 1, 4),
    "two": (5, 2, 1),
    "few": (5, 4, 3),
    "register": (3, 8, 8),
    "odd": (33, 9, 13),
    "edges": (2, 17, 65),
    "dlrm": (34, 27, 64),
    "wide": (2, 5, 1024),
    "many": (2, 70, 33),
    "no_samples": (0, 3, 4),
}
"""Samples b, vectors F and columns D by name."""

BENCHMARK = (4096, 27, 64)
"""The DLRM of Criteo: 26 features and the bottom MLP."""
