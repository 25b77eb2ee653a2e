# SPDX-License-Identifier: Apache-2.0
"""Saves a train state under one name, all or nothing, and loads it on any mesh.

A checkpoint is a folder: ``manifest.json``, ``tables/<table>/<array>/<first row>`` in position
order, ``dense`` for all else. Every process writes the rows of its own devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxsparse.ckpt.arrays import array_path, check_finite, open_array
from jaxsparse.ckpt.blocks import Array, write_array
from jaxsparse.ckpt.dense import (
    dense_leaves,
    place_like,
    read_dense,
    with_dense_leaves,
    write_dense,
)
from jaxsparse.ckpt.durable import publish, remove_tree
from jaxsparse.ckpt.errors import CheckpointError
from jaxsparse.ckpt.manifest import (
    FORMAT,
    INIT_WORDS,
    STORED,
    Manifest,
    arrays_of,
    check_files,
    check_fit,
    describe_feature,
    describe_table,
    is_value_array,
    leaf_name,
    read_manifest,
    stored_facts,
    write_manifest,
)
from jaxsparse.ckpt.processes import agree, is_writer
from jaxsparse.ckpt.stored import SavedPlain, SavedRows, describe_contents, write_table
from jaxsparse.ckpt.tables import Copies, TableArray, fill_tables, table_arrays
from jaxsparse.ckpt.unstored import InitialRows, put_saved_rows
from jaxsparse.durable import fault_point, make_folder
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.optimizers import rate_of
from jaxsparse.resident import most_rows
from jaxsparse.state import EmbeddingState
from jaxsparse.store import RowStore
from jaxsparse.store.contents import StoreContents, value_arrays

S = TypeVar("S")
"""A frozen dataclass and pytree with a field ``embeddings``, such as `TrainState`."""

DENSE = "dense"


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What is written of a state."""

    emb: EmbeddingCollection
    tables: list[TableArray]
    small: dict[str, Array]
    """Learning rates and dense leaves, on the host."""
    stored: StoreContents | None = None
    """Tables of a row store."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays: Iterable[Any] = [*self.tables, *self.small.values()]
        plain: int = sum(math.prod(a.shape) * int(a.dtype.itemsize) for a in arrays)
        stored = {} if self.stored is None else self.stored.tables
        return plain + sum(table.nbytes for table in stored.values())


def take_snapshot(
    emb: EmbeddingCollection,
    state: Any,
    copies: Copies | None = None,
    store: RowStore | None = None,
) -> Snapshot:
    """Looks at a state.

    Args:
        emb: the collection of ``state.embeddings``.
        state: a frozen dataclass and pytree with a field ``embeddings``.
        copies: copy the tables into these now; None reads them when they are written, and the
            state must not be donated before that.
        store: of the tables with Dynamic keys or tiers. They are read when they are written.
    """
    _check_store(emb, store)
    jax.block_until_ready(state)
    stored = None
    if emb.stored_tables and store is not None:
        stored = store.contents(state.embeddings)
    arrays = table_arrays(emb, state.embeddings, copies)
    return Snapshot(emb, arrays, _small_leaves(state), stored)


def still(store: RowStore | None) -> contextlib.AbstractContextManager[None]:
    """Keeps a row store as it is from the look at it until it is written."""
    return contextlib.nullcontext() if store is None else store.still()


def save_state(
    path: str | Path, emb: EmbeddingCollection, state: Any, store: RowStore | None = None
) -> Path:
    """Saves a state, tables in position order, without a second copy of them.

    The files are written beside ``path`` and renamed at the end: what is named ``path`` is
    complete. All processes call it.

    Args:
        path: of a folder that does not exist yet.
        emb: the collection of ``state.embeddings``.
        state: a frozen dataclass and pytree with a field ``embeddings``.
        store: the `RowStore` that goes with the state, where tables have Dynamic keys or tiers.

    Returns:
        ``path``, absolute.

    Raises:
        CheckpointError: ``path`` exists; nothing is overwritten.
        SaveError: it cannot be written, or a value is not finite.
        StoreError: a row cannot be read from the disks of ``store``.
        RuntimeError: passes of ``store`` are under way.
    """
    final = Path(path).absolute()
    if final.exists():
        raise CheckpointError(f"{final}: exists; a checkpoint is never overwritten")
    temporary = final.with_name(f"{final.name}.tmp")
    with still(store):
        snapshot = take_snapshot(emb, state, store=store)
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
    for table in snapshot.stored.tables.values() if snapshot.stored else ():
        write_table(folder, table)
        fault_point("in_arrays")
    if not is_writer(snapshot.emb.mesh):
        return
    for name, leaf in snapshot.small.items():
        check_finite(name, leaf)
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


def restore_state(
    path: str | Path, emb: EmbeddingCollection, template: S, store: RowStore | None = None
) -> S:
    """Loads a state that `save_state` or a `CheckpointManager` wrote, on the mesh of ``emb``.

    Args:
        path: of the checkpoint.
        emb: equal tables on any mesh, in any placement. Where a spec has another learning rate
            than when it was saved, the state gets that of ``template``, else the saved one.
        template: a state of the same structure, such as a fresh one. Its tables are donated:
            the rows are loaded into them.
        store: the `RowStore` that goes with the template, where tables have Dynamic keys or tiers;
            what it has of them is replaced. A table may have been saved with other tiers, or with
            all its rows on the devices, and the other way round.

    Raises:
        CheckpointError: there is no finished checkpoint, it is damaged, or it does not fit: every
            leaf that is missing, left over or of another shape or dtype is named.
    """
    loaded: S = load_state(path, emb, template, store=store).state
    return loaded


def load_state(
    path: str | Path,
    emb: EmbeddingCollection,
    template: Any,
    *,
    allow_new: bool = False,
    store: RowStore | None = None,
) -> Loaded:
    """As `restore_state`.

    Args:
        path: of the checkpoint.
        emb: the tables.
        template: as in `restore_state`; what the checkpoint lacks keeps its values.
        allow_new: whether it may lack any.
        store: as in `restore_state`.
    """
    _check_store(emb, store)
    final = Path(path).absolute()
    manifest = read_manifest(final)
    check_files(final, manifest)
    new = check_fit(final, manifest, _wanted(emb, template), allow_new)
    leaves = manifest["leaves"]
    small = {name: leaf for name, leaf in leaves.items() if not name.startswith("tables/")}
    stored = _saved_tables(final, emb, manifest)
    if store is not None:
        with _named(final):
            store.check_room(stored)
    values = read_dense(final / DENSE, small)
    old = template.embeddings
    saved, wanted = manifest["learning_rates"], _specified_rates(emb)
    changed = {n: rate for n, rate in wanted.items() if saved.get(n, rate) != rate}
    rates = _below("learning_rates/", values)
    init_words = values.get(INIT_WORDS)
    filled = _fill_plain(final, emb, manifest, old, init_words)
    if store is not None and emb.stored_tables:
        if init_words is not None and filled.init_words is not None:
            words = place_like({INIT_WORDS: init_words}, {INIT_WORDS: filled.init_words})
            filled = dataclasses.replace(filled, init_words=words[INIT_WORDS])
        with _named(final):
            filled = store.refill(filled, stored, manifest.get(STORED, {}).get("step"))
    loaded = dataclasses.replace(
        filled,
        learning_rates=place_like(
            {n: rate for n, rate in rates.items() if n not in changed}, old.learning_rates
        ),
    )
    return Loaded(
        with_dense_leaves(template, _below("dense/", values), loaded),
        new,
        tuple(f"{name}: {saved[name]} -> {rate}" for name, rate in changed.items()),
    )


def state_leaves(
    emb: EmbeddingCollection, state: Any, store: RowStore | None = None
) -> dict[str, Any]:
    """Every leaf as a numpy array by name, tables without padding: equal on every mesh.

    The whole state is copied to the host, but for the tables of ``store``: it has them by key.
    """
    snapshot = take_snapshot(emb, state, store=store)
    tables = {
        leaf_name(array.block.spec.name, array.name): np.array(array.read(0, array.shape[0]))
        for array in snapshot.tables
    }
    return {**tables, **snapshot.small}


def _check_store(emb: EmbeddingCollection, store: RowStore | None) -> None:
    """A state has only those rows of a row store's tables that are on the devices."""
    if emb.stored_tables and store is None:
        raise CheckpointError(
            f"tables {sorted(emb.stored_tables)} have Dynamic keys or tiers: the state has not all "
            "their rows; pass store=, the js.RowStore that goes with it (trainer.store)"
        )


def _below(prefix: str, values: Mapping[str, Array]) -> dict[str, Array]:
    return {n.removeprefix(prefix): value for n, value in values.items() if n.startswith(prefix)}


def _small_leaves(state: Any) -> dict[str, Array]:
    rates = state.embeddings.learning_rates
    small = {f"learning_rates/{name}": np.asarray(rate) for name, rate in rates.items()}
    if state.embeddings.init_words is not None:
        small[INIT_WORDS] = np.asarray(state.embeddings.init_words)
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
    more = {}
    if snapshot.stored is not None:
        more[STORED], of_stored = describe_contents(snapshot.stored)
        leaves |= of_stored
        parts |= {name: [0] for name in of_stored}
    return {
        "format": FORMAT,
        "jaxsparse": version("jaxsparse"),
        "bytes": snapshot.nbytes,
        "tables": {n: describe_table(spec) for n, spec in snapshot.emb.tables.items()},
        "features": [describe_feature(spec) for spec in snapshot.emb.features],
        "learning_rates": _specified_rates(snapshot.emb),
        "leaves": leaves,
        "parts": parts,
        **more,
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
    for name, table in emb.stored_tables.items():
        for array_name, (shape, dtype) in value_arrays(emb.layout.find(name)[0]).items():
            leaves[leaf_name(name, array_name)] = [[most_rows(table), *shape], str(dtype)]
    for name, leaf in _small_leaves(template).items():
        leaves[name] = [list(leaf.shape), str(leaf.dtype)]
    return {
        STORED: list(emb.stored_tables),
        "tables": {n: describe_table(s) for n, s in emb.tables.items()},
        "features": [describe_feature(spec) for spec in emb.features],
        "leaves": leaves,
    }


def _fill_plain(
    folder: Path,
    emb: EmbeddingCollection,
    manifest: Manifest,
    state: EmbeddingState,
    init_words: Array | None,
) -> EmbeddingState:
    """The state, donated, with all tables that are on the devices as they were saved."""
    readers: dict[tuple[str, str], Any] = {}
    saved_stored = stored_facts(manifest)
    was_stored = [name for name in saved_stored if name not in emb.stored_tables]
    for name in emb.tables:
        for array in arrays_of(manifest, name):
            if name not in saved_stored:
                readers[name, array] = open_array(folder, manifest, name, array)
            elif name in was_stored and is_value_array(array):
                assert init_words is not None
                readers[name, array] = InitialRows(emb, init_words, name, array)
    state = fill_tables(emb, state, readers)
    for name in was_stored:
        state = put_saved_rows(emb, state, name, SavedRows(folder, manifest, name))
    return state


def _saved_tables(
    folder: Path, emb: EmbeddingCollection, manifest: Manifest
) -> dict[str, SavedRows | SavedPlain]:
    """Tables for a row store that were saved; others are new."""
    saved_stored = stored_facts(manifest)
    return {
        name: (SavedRows if name in saved_stored else SavedPlain)(folder, manifest, name)
        for name in emb.stored_tables
        if name in manifest["tables"]
    }


@contextlib.contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Names the checkpoint that a row store cannot take in."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _finite(array: TableArray, start: int, stop: int) -> Iterable[Array]:
    for block in array.blocks(start, stop):
        check_finite(leaf_name(array.block.spec.name, array.name), block)
        yield block


def remove_temporary(folder: Path) -> None:
    """Deletes what saves that were killed have left; nobody may be saving there."""
    for path in folder.iterdir():
        if path.is_dir() and (".tmp" in path.suffixes or ".del-" in path.name):
            remove_tree(path)


def free_bytes(folder: Path) -> int:
    """Bytes that can be written there."""
    info = os.statvfs(folder)
    return info.f_bavail * info.f_frsize
