# SPDX-License-Identifier: Apache-2.0
"""Saves a train state under one name, all or nothing.

A checkpoint is a folder: ``manifest.json``, ``tables/<table>/<array>/<first row>`` in position
order, ``dense`` for all else. Every process writes the rows of its own devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxsparse.ckpt.arrays import array_path, check_finite
from jaxsparse.ckpt.blocks import Array, write_array
from jaxsparse.ckpt.dense import dense_leaves, write_dense
from jaxsparse.ckpt.durable import publish, remove_tree
from jaxsparse.ckpt.errors import CheckpointError
from jaxsparse.ckpt.manifest import (
    FORMAT,
    INIT_WORDS,
    STORED,
    Manifest,
    describe_feature,
    describe_table,
    leaf_name,
    write_manifest,
)
from jaxsparse.ckpt.processes import agree, is_writer
from jaxsparse.ckpt.stored import describe_contents, write_table
from jaxsparse.ckpt.tables import Copies, TableArray, table_arrays
from jaxsparse.durable import fault_point, make_folder
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.optimizers import rate_of
from jaxsparse.store import RowStore
from jaxsparse.store.contents import StoreContents

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
    check_store(emb, store)
    jax.block_until_ready(state)
    stored = None
    if emb.stored_tables and store is not None:
        stored = store.contents(state.embeddings)
    arrays = table_arrays(emb, state.embeddings, copies)
    return Snapshot(emb, arrays, small_leaves(state), stored)


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


def check_store(emb: EmbeddingCollection, store: RowStore | None) -> None:
    """Raises where the store is missing: the state has only those rows that are on the devices."""
    if emb.stored_tables and store is None:
        raise CheckpointError(
            f"tables {sorted(emb.stored_tables)} have Dynamic keys or tiers: the state has not all "
            "their rows; pass store=, the js.RowStore that goes with it (trainer.store)"
        )


def small_leaves(state: Any) -> dict[str, Array]:
    """All of a state but the arrays of its tables, on the host, by name."""
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
        "learning_rates": specified_rates(snapshot.emb),
        "leaves": leaves,
        "parts": parts,
        **more,
    }


def specified_rates(emb: EmbeddingCollection) -> dict[str, float | str]:
    """What the specs say, whatever the state's rates have become since."""
    return {
        name: "schedule" if callable(rate) else float(rate)
        for name, table in emb.tables.items()
        if table.trainable
        for rate in [rate_of(table.optimizer)]
    }


def _finite(array: TableArray, start: int, stop: int) -> Iterable[Array]:
    for block in array.blocks(start, stop):
        check_finite(leaf_name(array.block.spec.name, array.name), block)
        yield block
