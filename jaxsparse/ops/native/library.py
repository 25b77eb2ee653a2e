# SPDX-License-Identifier: Apache-2.0
"""The library of native kernels in this process: there or not, and why not."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

from jaxsparse.ops.native.compiler import NoNativeLibrary, build, sources

SWITCH = "JAXSPARSE_NATIVE"
"""Environment variable; 0 leaves the kernels out."""

# The symbol of a handler; its name is how `jax.ffi.ffi_call` names it.
_HANDLER = re.compile(r"^XLA_FFI_DEFINE_HANDLER_SYMBOL\(\s*(\w+)", re.MULTILINE)


_is_left_out = ContextVar("_is_left_out", default=False)


@contextmanager
def left_out() -> Iterator[None]:
    """A block in which nothing new takes the kernels, as on a machine without a compiler.

    Collections made in it stay on XLA; what was compiled before it keeps its kernels.
    """
    token = _is_left_out.set(True)
    try:
        yield
    finally:
        _is_left_out.reset(token)


def is_available() -> bool:
    """Whether native kernels run in this process; compiles them if that was never done."""
    return why_not() is None


def why_not() -> str | None:
    """Why there are none; None where there are."""
    if _is_left_out.get():
        return "`library.left_out` leaves them out"
    found = _loaded()
    return found if isinstance(found, str) else None


def load() -> ctypes.CDLL:
    """The library, its handlers registered.

    Raises:
        RuntimeError: there is none; says why.
    """
    found = _loaded()
    if isinstance(found, str):
        raise RuntimeError(f"the native kernels are not there: {found}")
    return found


@functools.cache
def _loaded() -> ctypes.CDLL | str:
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 leaves them out"
    try:
        library = ctypes.CDLL(str(build()))
    except (NoNativeLibrary, OSError) as error:
        logging.getLogger("jaxsparse").warning(
            "jaxsparse runs without its native CPU kernels, on XLA, which is slower: %s", error
        )
        return str(error)
    for name in handler_names():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return library


def handler_names() -> list[str]:
    """Names of all XLA handlers that the sources define."""
    return [name for source in sources() for name in _HANDLER.findall(source.read_text())]
