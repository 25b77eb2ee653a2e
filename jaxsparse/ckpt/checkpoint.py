# SPDX-License-Identifier: Apache-2.0
"""Saves a train state under one name, all or nothing, and loads it on any mesh."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxsparse.ckpt.tables import abstract_tables, join_tables, split_tables
from jaxsparse.embedding import EmbeddingCollection

S = TypeVar("S")
"""A frozen dataclass and pytree with a field ``embeddings``, such as `TrainState`."""

FORMAT = 1
MANIFEST = "manifest.json"
ARRAYS = "arrays"


class CheckpointError(ValueError):
    """A checkpoint that is not there, is not finished, or does not fit the state."""


def save_state(path: str | Path, emb: EmbeddingCollection, state: Any) -> Path:
    """Saves a state, tables in position order.

    The files are written beside ``path`` and renamed at the end: what is named ``path`` is
    complete. Needs the tables' memory once more while it runs.

    Args:
        path: of a folder that does not exist yet.
        emb: the collection of ``state.embeddings``.
        state: a frozen dataclass and pytree with a field ``embeddings``.

    Returns:
        ``path``, absolute.

    Raises:
        CheckpointError: ``path`` exists; nothing is overwritten.
    """
    final = Path(path).absolute()
    if final.exists():
        raise CheckpointError(f"{final}: exists; a checkpoint is never overwritten")
    tree = _saved_tree(emb, state)
    temporary = final.with_name(f"{final.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write_arrays(temporary / ARRAYS, tree)
        manifest = {"format": FORMAT, "leaves": _manifest_leaves(emb, tree)}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def restore_state(path: str | Path, emb: EmbeddingCollection, template: S) -> S:
    """Loads a state that `save_state` wrote, on the mesh of ``emb``.

    Args:
        path: of the checkpoint.
        emb: equal tables on any mesh, in any placement.
        template: a state of the same structure, such as a fresh one. Shapes, dtypes and
            shardings are taken from it, no values.

    Raises:
        CheckpointError: there is no finished checkpoint, or it does not fit: every leaf that is
            missing, left over or of another shape or dtype is named.
    """
    final = Path(path).absolute()
    embeddings = template.embeddings  # type: ignore[attr-defined]
    wanted = {
        "tables": abstract_tables(emb, embeddings),
        "learning_rates": jax.tree.map(_abstract, embeddings.learning_rates),
        "dense": {name: _abstract(leaf) for name, leaf in _dense_leaves(template).items()},
    }
    _check_fit(final, _read_manifest(final), _manifest_leaves(emb, wanted))
    tree = _read_arrays(final / ARRAYS, wanted)
    rates = {name: tree["learning_rates"][name] for name in embeddings.learning_rates}
    loaded = join_tables(emb, embeddings, tree["tables"], rates)
    return _with_dense_leaves(template, tree["dense"], loaded)


def state_leaves(emb: EmbeddingCollection, state: Any) -> dict[str, Any]:
    """Every leaf as a numpy array by name, tables without padding: equal on every mesh.

    The whole state is copied to the host.
    """
    leaves = {}
    for name, leaf in _walk(_saved_tree(emb, state)):
        array = np.asarray(leaf)
        if name[0] == "tables":
            slab, index = emb.layout.find(name[1])
            array = array[: slab.tables[index].addressing.num_positions]
        leaves["/".join(name)] = array
    return leaves


def _saved_tree(emb: EmbeddingCollection, state: Any) -> dict[str, Any]:
    return {
        "tables": split_tables(emb, state.embeddings),
        "learning_rates": state.embeddings.learning_rates,
        "dense": _dense_leaves(state),
    }


def _dense_leaves(state: Any) -> dict[str, Any]:
    """Every leaf but those of ``embeddings`` by its path; keys as their data."""
    return {name: _key_data(leaf) for name, leaf in _named_leaves(state)}


def _named_leaves(state: Any) -> list[tuple[str, Any]]:
    rest = dataclasses.replace(state, embeddings=None)
    flat, _ = jax.tree_util.tree_flatten_with_path(rest)
    named = [(jax.tree_util.keystr(p, simple=True, separator="."), leaf) for p, leaf in flat]
    # nnx adds the name of its variables' only attribute.
    return [(name.removesuffix(".value"), leaf) for name, leaf in named]


def _with_dense_leaves(template: S, leaves: Mapping[str, Any], embeddings: Any) -> S:
    rest = dataclasses.replace(template, embeddings=None)  # type: ignore[type-var]
    values = []
    for name, leaf in _named_leaves(template):
        value = leaves[name]
        if _is_key(leaf):
            value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf))
        values.append(value)
    filled: S = jax.tree.unflatten(jax.tree.structure(rest), values)
    return dataclasses.replace(filled, embeddings=embeddings)  # type: ignore[type-var]


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _key_data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _write_arrays(path: Path, tree: Any) -> None:
    # Without OCDBT: its default compression runs at a sixth of the disk's speed.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(_quoted(tree)))


def _read_arrays(path: Path, wanted: Any) -> Any:
    def restore_args(leaf: jax.ShapeDtypeStruct) -> ocp.ArrayRestoreArgs:
        # strict=False cuts or pads the rows behind a table's last one; all else was checked.
        return ocp.ArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=False
        )

    item = _quoted(wanted)
    args = ocp.args.PyTreeRestore(item=item, restore_args=jax.tree.map(restore_args, item))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        return _unquoted(checkpointer.restore(path, args=args))


def _quoted(tree: Any) -> Any:
    """Names as file names: a table may be called ``a/b``."""
    if not isinstance(tree, dict):
        return tree
    return {urllib.parse.quote(name, safe=""): _quoted(inner) for name, inner in tree.items()}


def _unquoted(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {urllib.parse.unquote(name): _unquoted(inner) for name, inner in tree.items()}


def _manifest_leaves(emb: EmbeddingCollection, tree: Mapping[str, Any]) -> dict[str, list[Any]]:
    """``[shape, dtype]`` by leaf; tables with their vocabulary's rows, which no mesh changes."""
    leaves = {}
    for name, leaf in _walk(tree):
        shape = list(leaf.shape)
        if name[0] == "tables":
            shape[0] = emb.tables[name[1]].vocabulary_size
        leaves["/".join(name)] = [shape, str(leaf.dtype)]
    return leaves


def _walk(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    for name, inner in tree.items():
        if isinstance(inner, dict):
            yield from _walk(inner, (*path, name))
        else:
            yield (*path, name), inner


def _read_manifest(final: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((final / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{final}: no checkpoint there ({MANIFEST} is missing)") from None
    except ValueError as error:
        raise CheckpointError(f"{final / MANIFEST}: cannot be read: {error}") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{final}: has format {manifest.get('format')!r}, this version reads {FORMAT}"
        )
    return manifest


def _check_fit(final: Path, manifest: Mapping[str, Any], wanted: Mapping[str, list[Any]]) -> None:
    saved = manifest["leaves"]
    wrong = [
        f"{name}: saved {_leaf_text(saved.get(name))}, wanted {_leaf_text(wanted.get(name))}"
        for name in dict.fromkeys([*wanted, *saved])
        if saved.get(name) != wanted.get(name)
    ]
    if wrong:
        raise CheckpointError(f"{final}: does not fit the state:\n  " + "\n  ".join(wrong))


def _leaf_text(leaf: list[Any] | None) -> str:
    return "none" if leaf is None else f"{leaf[1]}{leaf[0]}"
