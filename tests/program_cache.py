# SPDX-License-Identifier: Apache-2.0
"""Compiled programs that the processes of a test run share: many tests, and the processes that they
start, need the same ones, and compiling them is most of the time of the tests.

A program is found by its text, compiler and options, so a hit is the machine code that compiling
would give. jax writes entries in place; one that is cut short is compiled again (with a warning,
which pyproject.toml lets pass), and processes that are killed on purpose only read.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile

FOLDER = "JAX_COMPILATION_CACHE_DIR"

KEEP_ALL = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

ONLY_READ = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}
"""Environment of processes that are killed: what they compile is kept by nobody."""


def start():
    """Names the folder in the environment, before jax is imported; it lives as long as the run.

    Workers of pytest-xdist inherit it, as does every process a test starts.
    """
    for name, value in KEEP_ALL.items():
        os.environ.setdefault(name, value)
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="jaxsparse-programs-")
        atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)


@contextlib.contextmanager
def switched_off():
    """Compiles inside the block are real: for tests that read the compiler's report of them."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax asks once whether there is a cache
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
