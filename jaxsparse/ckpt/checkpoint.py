# SPDX-License-Identifier: Apache-2.0
"""Saves a train state under one name, all or nothing, and loads it on any mesh.

A checkpoint is a folder: ``manifest.json``, ``tables/<table>/<array>/<first row>`` in position
order, ``dense`` for all else. Every process writes the rows of its own devices.
"""

from __future__ import annotations

import dataclasses
import math
import os
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxsparse.ckpt.blocks import Array, ArrayReader, write_array
from jaxsparse.ckpt.dense import (
    dense_leaves,
    place_like,
    read_dense,
    with_dense_leaves,
    write_dense,
)
from jaxsparse.ckpt.durable import publish, remove_tree
from jaxsparse.ckpt.errors import CheckpointError, SaveError
from jaxsparse.ckpt.manifest import (
    FORMAT,
    Manifest,
    check_files,
    check_fit,
    describe_feature,
    describe_table,
    leaf_name,
    read_manifest,
    write_manifest,
)
from jaxsparse.ckpt.processes import agree, is_writer
from jaxsparse.ckpt.tables import Copies, TableArray, fill_tables, table_arrays
from jaxsparse.durable import fault_point, make_folder
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.optimizers import rate_of

S = TypeVar("S")
"""A frozen dataclass and pytree with a field ``embeddings``, such as `TrainState`."""

TABLES = "tables"
DENSE = "dense"


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What is written of a state."""

    emb: EmbeddingCollection
    tables: list[TableArray]
    small: dict[str, Array]
    """Learning rates and dense leaves, on the host."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays: Iterable[Any] = [*self.tables, *self.small.values()]
        return sum(math.prod(a.shape) * int(a.dtype.itemsize) for a in arrays)


def take_snapshot(emb: EmbeddingCollection, state: Any, copies: Copies | None = None) -> Snapshot:
    """Looks at a state.

    Args:
        emb: the collection of ``state.embeddings``.
        state: a frozen dataclass and pytree with a field ``embeddings``.
        copies: copy the tables into these now; None reads them when they are written, and the
            state must not be donated before that.
    """
    _refuse_stored(emb)
    jax.block_until_ready(state)
    return Snapshot(emb, table_arrays(emb, state.embeddings, copies), _small_leaves(state))


def save_state(path: str | Path, emb: EmbeddingCollection, state: Any) -> Path:
    """Saves a state, tables in position order, without a second copy of them.

    The files are written beside ``path`` and renamed at the end: what is named ``path`` is
    complete. All processes call it.

    Args:
        path: of a folder that does not exist yet.
        emb: the collection of ``state.embeddings``.
        state: a frozen dataclass and pytree with a field ``embeddings``.

    Returns:
        ``path``, absolute.

    Raises:
        CheckpointError: ``path`` exists; nothing is overwritten.
        SaveError: it cannot be written, or a value is not finite.
    """
    final = Path(path).absolute()
    if final.exists():
        raise CheckpointError(f"{final}: exists; a checkpoint is never overwritten")
    temporary = final.with_name(f"{final.name}.tmp")
    snapshot = take_snapshot(emb, state)
    write_and_publish(emb.mesh, temporary, final, lambda: write_state(temporary, snapshot))
    return final


def write_and_publish(mesh: Mesh, temporary: Path, final: Path, write: Callable[[], None]) -> None:
    """Makes ``temporary``, lets every process write into it and renames it.

    Raises:
        SaveError: on every process, if any of them fails; ``temporary`` is gone then.
    """
    first = is_writer(mesh)
    try:
        with agree(mesh, final):
            if first:
                make_folder(final.parent)
                remove_tree(temporary)
                temporary.mkdir()
        with agree(mesh, final):
            write()
        with agree(mesh, final):
            if first:
                publish(temporary, final)
    finally:
        if first:
            remove_tree(temporary)


def write_state(folder: Path, snapshot: Snapshot, **notes: Any) -> None:
    """Writes this process's rows; the first process writes all else, the manifest last.

    Args:
        folder: exists.
        snapshot: of the state.
        notes: further entries of the manifest.

    Raises:
        SaveError: a value is not finite.
    """
    here = jax.process_index()
    for array in snapshot.tables:
        parts = array.parts()
        stops = [start for start, _ in parts[1:]] + [array.shape[0]]
        path = array_path(folder, array.block.spec.name, array.name)
        for (start, process), stop in zip(parts, stops, strict=True):
            if process == here:
                blocks = _finite(array, start, stop)
                write_array(
                    path / str(start), (stop - start, *array.row_shape), array.dtype, blocks
                )
        fault_point("in_arrays")
    if not is_writer(snapshot.emb.mesh):
        return
    for name, leaf in snapshot.small.items():
        _check_finite(name, leaf)
    write_dense(folder / DENSE, snapshot.small)
    fault_point("before_manifest")
    write_manifest(folder, {**_manifest(snapshot), **notes})


class Loaded(NamedTuple):
    """What `load_state` returns."""

    state: Any
    new: tuple[str, ...]
    """Tables and leaves that the checkpoint lacked."""
    changed: tuple[str, ...]
    """Learning rates that the tables' specs no longer have as when it was saved, for people."""


def restore_state(path: str | Path, emb: EmbeddingCollection, template: S) -> S:
    """Loads a state that `save_state` or a `CheckpointManager` wrote, on the mesh of ``emb``.

    Args:
        path: of the checkpoint.
        emb: equal tables on any mesh, in any placement. Where a spec has another learning rate
            than when it was saved, the state gets that of ``template``, else the saved one.
        template: a state of the same structure, such as a fresh one. Its tables are donated:
            the rows are loaded into them.

    Raises:
        CheckpointError: there is no finished checkpoint, it is damaged, or it does not fit: every
            leaf that is missing, left over or of another shape or dtype is named.
    """
    loaded: S = load_state(path, emb, template).state
    return loaded


def load_state(
    path: str | Path, emb: EmbeddingCollection, template: Any, *, allow_new: bool = False
) -> Loaded:
    """As `restore_state`.

    Args:
        path: of the checkpoint.
        emb: the tables.
        template: as in `restore_state`; what the checkpoint lacks keeps its values.
        allow_new: whether it may lack any.
    """
    _refuse_stored(emb)
    final = Path(path).absolute()
    manifest = read_manifest(final)
    check_files(final, manifest)
    new = check_fit(final, manifest, _wanted(emb, template), allow_new)
    leaves = manifest["leaves"]
    small = {name: leaf for name, leaf in leaves.items() if not name.startswith("tables/")}
    values = read_dense(final / DENSE, small)
    old = template.embeddings
    saved, wanted = manifest["learning_rates"], _specified_rates(emb)
    changed = {n: rate for n, rate in wanted.items() if saved.get(n, rate) != rate}
    rates = _below("learning_rates/", values)
    loaded = dataclasses.replace(
        fill_tables(emb, old, _readers(final, emb, manifest)),
        learning_rates=place_like(
            {n: rate for n, rate in rates.items() if n not in changed}, old.learning_rates
        ),
    )
    return Loaded(
        with_dense_leaves(template, _below("dense/", values), loaded),
        new,
        tuple(f"{name}: {saved[name]} -> {rate}" for name, rate in changed.items()),
    )


def state_leaves(emb: EmbeddingCollection, state: Any) -> dict[str, Any]:
    """Every leaf as a numpy array by name, tables without padding: equal on every mesh.

    The whole state is copied to the host.
    """
    snapshot = take_snapshot(emb, state)
    tables = {
        leaf_name(array.block.spec.name, array.name): np.array(array.read(0, array.shape[0]))
        for array in snapshot.tables
    }
    return {**tables, **snapshot.small}


def open_array(folder: Path, manifest: Manifest, table: str, array: str) -> ArrayReader:
    """A reader of an array of a table, ``[P, ...]`` in position order; needs no mesh."""
    name = leaf_name(table, array)
    shape, dtype = manifest["leaves"][name]
    return ArrayReader(array_path(folder, table, array), manifest["parts"][name], shape, dtype)


def array_path(folder: Path, table: str, array: str) -> Path:
    """Folder of the parts of an array."""
    return folder / TABLES / urllib.parse.quote(table, safe="") / urllib.parse.quote(array, safe="")


def _refuse_stored(emb: EmbeddingCollection) -> None:
    """A state has only those rows of stored tables that are on the devices."""
    if emb.stored_tables:
        raise CheckpointError(
            f"tables {sorted(emb.stored_tables)} have Dynamic keys or tiers: the state has not all "
            "their rows, checkpoints cannot hold them; use store.keys and store.read"
        )


def _below(prefix: str, values: Mapping[str, Array]) -> dict[str, Array]:
    return {n.removeprefix(prefix): value for n, value in values.items() if n.startswith(prefix)}


def _small_leaves(state: Any) -> dict[str, Array]:
    rates = state.embeddings.learning_rates
    small = {f"learning_rates/{name}": np.asarray(rate) for name, rate in rates.items()}
    return small | {f"dense/{name}": leaf for name, leaf in dense_leaves(state).items()}


def _manifest(snapshot: Snapshot) -> Manifest:
    leaves: dict[str, Any] = {}
    parts = {}
    for array in snapshot.tables:
        name = leaf_name(array.block.spec.name, array.name)
        leaves[name] = [list(array.shape), str(array.dtype)]
        parts[name] = [start for start, _ in array.parts()]
    for name, leaf in snapshot.small.items():
        leaves[name] = [list(leaf.shape), str(leaf.dtype)]
    return {
        "format": FORMAT,
        "jaxsparse": version("jaxsparse"),
        "bytes": snapshot.nbytes,
        "tables": {n: describe_table(spec) for n, spec in snapshot.emb.tables.items()},
        "features": [describe_feature(spec) for spec in snapshot.emb.features],
        "learning_rates": _specified_rates(snapshot.emb),
        "leaves": leaves,
        "parts": parts,
    }


def _specified_rates(emb: EmbeddingCollection) -> dict[str, float | str]:
    """What the specs say, whatever the state's rates have become since."""
    return {
        name: "schedule" if callable(rate) else float(rate)
        for name, table in emb.tables.items()
        if table.trainable
        for rate in [rate_of(table.optimizer)]
    }


def _wanted(emb: EmbeddingCollection, template: Any) -> Mapping[str, Any]:
    leaves: dict[str, Any] = {}
    for array in table_arrays(emb, template.embeddings):
        name = leaf_name(array.block.spec.name, array.name)
        leaves[name] = [list(array.shape), str(array.dtype)]
    for name, leaf in _small_leaves(template).items():
        leaves[name] = [list(leaf.shape), str(leaf.dtype)]
    return {
        "tables": {n: describe_table(s) for n, s in emb.tables.items()},
        "features": [describe_feature(spec) for spec in emb.features],
        "leaves": leaves,
    }


def _readers(
    folder: Path, emb: EmbeddingCollection, manifest: Manifest
) -> dict[tuple[str, str], ArrayReader]:
    readers = {}
    for name in manifest["parts"]:
        table, _, array = name.removeprefix("tables/").rpartition("/")
        if table in emb.tables:
            readers[table, array] = open_array(folder, manifest, table, array)
    return readers


def _finite(array: TableArray, start: int, stop: int) -> Iterable[Array]:
    for block in array.blocks(start, stop):
        _check_finite(leaf_name(array.block.spec.name, array.name), block)
        yield block


def _check_finite(name: str, values: Array) -> None:
    """A state that is lost must not push a sound one out of the folder."""
    if values.dtype.kind in "iub":
        return
    bad = values.size - int(np.isfinite(values).sum())
    if bad:
        raise SaveError(f"{name}: {bad} values are not finite; the state is not saved")


def remove_temporary(folder: Path) -> None:
    """Deletes what saves that were killed have left; nobody may be saving there."""
    for path in folder.iterdir():
        if path.is_dir() and (".tmp" in path.suffixes or ".del-" in path.name):
            remove_tree(path)


def free_bytes(folder: Path) -> int:
    """Bytes that can be written there."""
    info = os.statvfs(folder)
    return info.f_bavail * info.f_frsize
