# SPDX-License-Identifier: Apache-2.0
"""Calls of the store's C++ (`crc32c.cc`, `reader.cc`); other Python threads run meanwhile."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from jaxsparse.ops.native import library
from jaxsparse.ops.packing.native import address


def call(name: str, *arguments: Any) -> int:
    """Calls a function with int64 numbers, and arrays by address; its int64."""
    function = getattr(library.load(), name)
    function.restype = ctypes.c_int64  # ctypes takes an int else, half of an address
    values = [
        ctypes.c_int64(address(one) if isinstance(one, np.ndarray) else one) for one in arguments
    ]
    return int(function(*values))
