# SPDX-License-Identifier: Apache-2.0
"""Keys to codes in C++ (`encode.cc`), all features of a slab in one call."""

from __future__ import annotations

import ctypes
from typing import Any

from jaxsparse.ops.native import library


class Feature(ctypes.Structure):
    """One feature; fields and order are those of `Feature` in encode.cc, which explains them.

    Arrays go by address: whoever fills one in keeps them alive. After `encode` ``status`` is 0,
    or 1 where a key has no row or a bag is too long; results are undefined then.
    """

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "vocabulary_size",
            "is_hashed",
            "is_seeded",
            "mixed_seed",
            "num_exact",
            "exact_position",
            "exact_fingerprint",
            "exact_shift",
            "exact_mask",
            "permutation",
            "column_size",
            "num_columns",
            "block_rows",
            "first_code",
            "rows_per_shard",
            "is_ignoring",
            "is_unpooled",
            "max_length",
            "truncation",
            "keys",
            "num_keys",
            "is_int32",
            "is_filtered",
            "has_padding",
            "padding",
            "num_bags",
            "splits",
            "width",
            "codes",
            "out_splits",
            "lengths",
            "index",
            "position",
            "ignored",
            "status",
        )
    ]


def encode(features: Any, count: int) -> None:
    """Codes the keys of the first ``count`` entries of an array of `Feature`."""
    library.load().jaxsparse_encode(features, ctypes.c_int64(count))
