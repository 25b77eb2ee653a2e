# SPDX-License-Identifier: Apache-2.0
"""All of a state but the tables: small arrays by name, through orbax."""

from __future__ import annotations

import dataclasses
import logging
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.ckpt.blocks import Array, unreadable
from jaxsparse.ckpt.errors import CheckpointError

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

S = TypeVar("S")

_NEWS = "Skipping merge of OCDBT"
"""Of what orbax warns at every save; the arrays are plain files here, on purpose."""


def dense_leaves(state: Any) -> dict[str, Array]:
    """Every leaf but those of ``embeddings`` on the host by its path; keys as their data.

    Raises:
        CheckpointError: two leaves have one name, such as ``{"a.b": x}`` and ``{"a": {"b": y}}``.
    """
    leaves: dict[str, Array] = {}
    for name, leaf in _named_leaves(state):
        if name in leaves:
            raise CheckpointError(f"two leaves of the state are called {name!r}; rename one")
        leaves[name] = np.asarray(_key_data(leaf))
    return leaves


def with_dense_leaves(template: S, leaves: Mapping[str, Any], embeddings: Any) -> S:
    """The template with other leaves and embeddings; leaves not given keep their values.

    Shardings are the template's; nothing of it is donated.
    """
    rest = dataclasses.replace(template, embeddings=None)  # type: ignore[type-var]
    named = _named_leaves(template)
    old = [_key_data(leaf) for _, leaf in named]
    new = [
        _place(leaves[name], leaf.sharding) if name in leaves else leaf
        for (name, _), leaf in zip(named, old, strict=True)
    ]
    copied = _copies(new)
    values = [
        jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else value
        for value, (_, leaf) in zip(copied, named, strict=True)
    ]
    filled: S = jax.tree.unflatten(jax.tree.structure(rest), values)
    return dataclasses.replace(filled, embeddings=embeddings)  # type: ignore[type-var]


def place_like(values: Mapping[str, Any], old: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Arrays by name with the shardings of others, which name those there shall be."""
    new = {
        name: _place(values[name], array.sharding) if name in values else array
        for name, array in old.items()
    }
    return dict(zip(old, _copies(list(new.values())), strict=True))


def write_dense(path: Path, leaves: Mapping[str, Array]) -> None:
    """Writes arrays by name; those without elements are left to the manifest."""
    import orbax.checkpoint as ocp

    tree = {_quote(name): leaf for name, leaf in leaves.items() if leaf.size}
    with _checkpointer() as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


def read_dense(path: Path, wanted: Mapping[str, list[Any]]) -> dict[str, Array]:
    """Reads arrays by name.

    Args:
        path: as given to `write_dense`.
        wanted: ``[shape, dtype]`` by name.

    Raises:
        DamagedError: one cannot be read.
    """
    import orbax.checkpoint as ocp

    shapes = {name: (tuple(shape), np.dtype(dtype)) for name, (shape, dtype) in wanted.items()}
    leaves = {name: np.zeros(*kind) for name, kind in shapes.items()}
    item = {_quote(name): leaf for name, leaf in leaves.items() if leaf.size}
    if item:
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        try:
            with _checkpointer() as checkpointer:
                read = checkpointer.restore(
                    path, args=ocp.args.PyTreeRestore(item=item, restore_args=args)
                )
        except (ValueError, KeyError, OSError) as error:
            raise unreadable(path, error) from error
        leaves |= {name: np.asarray(read[_quote(name)]) for name in leaves if _quote(name) in read}
    return leaves


def _copies(arrays: list[jax.Array]) -> list[jax.Array]:
    """Copies made inside jit: what only borrows numpy's memory could not be donated."""
    by_devices: dict[frozenset[Any], list[int]] = {}
    for index, array in enumerate(arrays):
        by_devices.setdefault(frozenset(array.sharding.device_set), []).append(index)
    copied = list(arrays)
    for indices in by_devices.values():
        group = [arrays[index] for index in indices]
        copy = jax.jit(
            lambda leaves: [jnp.copy(leaf) for leaf in leaves],
            out_shardings=[leaf.sharding for leaf in group],
        )
        for index, made in zip(indices, copy(group), strict=True):
            copied[index] = made
    return copied


def _named_leaves(state: Any) -> list[tuple[str, Any]]:
    rest = dataclasses.replace(state, embeddings=None)
    flat, _ = jax.tree_util.tree_flatten_with_path(rest)
    named = [(jax.tree_util.keystr(p, simple=True, separator="."), leaf) for p, leaf in flat]
    # nnx adds the name of its variables' only attribute.
    return [(name.removesuffix(".value"), leaf) for name, leaf in named]


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _key_data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _place(value: Any, sharding: Any) -> jax.Array:
    array = np.asarray(value)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _quote(name: str) -> str:
    """A name as a file name."""
    return urllib.parse.quote(name, safe="")


def _checkpointer() -> ocp.Checkpointer:
    import orbax.checkpoint as ocp  # a quarter of a second, which runs without saves do not need

    # Each process for itself: those of the tables agree elsewhere. OCDBT compresses at a sixth of
    # the disk's speed, which small arrays do not feel, and saves two files for each of them.
    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"process{here}"
    )
    logging.getLogger("absl").addFilter(_is_no_news)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _is_no_news(record: logging.LogRecord) -> bool:
    return _NEWS not in record.getMessage()
