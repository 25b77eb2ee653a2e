# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of jaxsparse and of code that uses it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.ragged import Ragged

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class CompileCount:
    """Programs compiled since the count began."""

    programs: int = 0


@contextlib.contextmanager
def count_compiles() -> Iterator[CompileCount]:
    """Counts backend compilations inside the block, through `jax.monitoring`.

    >>> with count_compiles() as count:
    ...     _ = jax.jit(lambda x: x * 3.25 + 7)(np.float32(2))
    >>> count.programs > 0
    True
    """
    count = CompileCount()
    active = True

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        if active and event == COMPILE_EVENT:
            count.programs += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        active = False  # public API has no way to take one listener away


def random_ragged(
    rng: np.random.Generator, num_bags: int, max_length: int, num_keys: int
) -> Ragged:
    """A Ragged of ``num_bags`` bags of 0 .. max_length uniform keys below ``num_keys``."""
    lengths = rng.integers(0, max_length + 1, num_bags)
    return Ragged.from_lengths(rng.integers(0, num_keys, int(lengths.sum())), lengths)


def assert_trees_equal(got: Any, want: Any) -> None:
    """Asserts that two pytrees are bitwise equal, naming the leaf that is not."""
    got_leaves, got_tree = jax.tree_util.tree_flatten_with_path(got)
    want_leaves, want_tree = jax.tree_util.tree_flatten_with_path(want)
    assert str(got_tree) == str(want_tree), f"trees differ: {got_tree} and {want_tree}"
    for (path, g), (_, w) in zip(got_leaves, want_leaves, strict=True):
        g, w = _as_numpy(g), _as_numpy(w)
        same = g.shape == w.shape and g.dtype == w.dtype and g.tobytes() == w.tobytes()
        assert same, f"leaf {jax.tree_util.keystr(path)} differs"


def _as_numpy(leaf: Any) -> np.ndarray[Any, Any]:
    """The leaf's values; a typed PRNG key as the integers it is made of."""
    is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)
