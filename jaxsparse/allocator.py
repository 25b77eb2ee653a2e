# SPDX-License-Identifier: Apache-2.0
"""Keeps the memory of one step for the next one: settings of glibc's allocator, for CPUs.

XLA for CPU allocates the temporary buffer and the results of every run anew. glibc gets such large
blocks from the system and gives them back, so each step meets fresh pages: tens of thousands of
page faults, each of which zeroes 4 KiB. With a threshold above the blocks' size they come from the
heap, which keeps its pages; with one heap for all threads, what one has freed the next one finds.

Threads choose their heap when they first allocate, and XLA's start with its CPU backend. Settings
made after that have no effect, so importing `jaxsparse` makes them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys

import jax

SWITCH = "JAXSPARSE_ALLOCATOR"
"""Environment variable; 0 leaves the allocator as it is."""

# Parameters of mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8

LARGEST_KEPT = 1 << 30
"""Bytes; larger blocks, such as tables, come from the system and go back to it as before."""
LARGEST_KEPT_OLD = 1 << 25
"""The most that glibc takes before 2.35."""
MOST_KEPT = 1 << 30
"""Free bytes at the heap's end that are not given back."""


def why_not() -> str | None:
    """Why the allocator is left as it is in this process; None where settings are made."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if own := sorted(name for name in os.environ if name.startswith("MALLOC_")):
        return f"the environment has settings of its own: {', '.join(own)}"
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return "the environment has settings of its own: GLIBC_TUNABLES"
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return "the C library is not glibc"
    if not _computes_on_cpu():
        return "jax computes on another platform than the CPU"
    return None


def _computes_on_cpu() -> bool:
    """What jax will choose; asking it would start it."""
    platforms = jax.config.values["jax_platforms"]
    if platforms:
        return bool(platforms.split(",")[0] == "cpu")
    return importlib.util.find_spec("jax_plugins") is None


@functools.cache
def keep_pages() -> bool:
    """Makes the settings, once a process; returns whether it did."""
    if why_not() is not None:
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_ARENA_MAX, 1)
    if not mallopt(_MMAP_THRESHOLD, LARGEST_KEPT):
        mallopt(_MMAP_THRESHOLD, LARGEST_KEPT_OLD)
    mallopt(_TRIM_THRESHOLD, MOST_KEPT)
    return True
