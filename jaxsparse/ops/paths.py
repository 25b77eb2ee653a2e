# SPDX-License-Identifier: Apache-2.0
"""Which family of implementations a platform gets."""

from __future__ import annotations

from typing import Literal

from jaxsparse.ops.native import library

Path = Literal["native", "triton", "xla"]
"""C++ on CPUs, Pallas on NVIDIA's GPUs, XLA's own operations anywhere."""


def path_of(platform: str) -> Path:
    """The best path there is on a device's ``platform``.

    >>> path_of("cuda"), path_of("tpu")
    ('triton', 'xla')
    """
    if platform == "cpu" and library.is_available():
        return "native"
    return "triton" if platform in ("gpu", "cuda") else "xla"
