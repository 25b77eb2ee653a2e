# SPDX-License-Identifier: Apache-2.0
"""Which family of implementations a platform gets, and why."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxsparse.ops.native import library
from jaxsparse.ops.native.compiler import OPS

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


@dataclasses.dataclass(frozen=True)
class Choice:
    """What one operation runs on."""

    op: str
    path: Path
    why: str


def choices(platform: str) -> list[Choice]:
    """The path of every operation on a platform.

    An operation has the implementations whose files lie in its folder: ``*.cc`` for CPUs,
    ``gpu.py`` for GPUs; XLA's it always has.
    """
    path = path_of(platform)
    folders = sorted(file.parent for file in OPS.glob("*/reference.py"))
    found = []
    for folder in folders:
        is_there = {
            "native": any(folder.glob("*.cc")),
            "triton": (folder / "gpu.py").exists(),
            "xla": True,
        }
        if is_there[path]:
            found.append(Choice(folder.name, path, _WHY[path] or _why_xla(platform)))
        else:
            found.append(Choice(folder.name, "xla", f"XLA's program is as good on {platform}"))
    return found


_WHY = {"native": "C++, compiled on this machine", "triton": "Pallas kernel (Triton)", "xla": ""}


def _why_xla(platform: str) -> str:
    if platform == "cpu":
        return f"no native kernels: {library.why_not()}"
    return f"there are kernels for CPUs and NVIDIA GPUs, none for {platform}"
