# SPDX-License-Identifier: Apache-2.0
"""Loads a train state that was saved, on any mesh, under any tiers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxsparse.ckpt.arrays import open_array
from jaxsparse.ckpt.blocks import Array
from jaxsparse.ckpt.checkpoint import DENSE, check_store, small_leaves, specified_rates
from jaxsparse.ckpt.dense import place_like, read_dense, with_dense_leaves
from jaxsparse.ckpt.errors import CheckpointError
from jaxsparse.ckpt.manifest import (
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
)
from jaxsparse.ckpt.stored import SavedPlain, SavedRows
from jaxsparse.ckpt.tables import fill_tables, table_arrays
from jaxsparse.ckpt.unstored import InitialRows, put_saved_rows
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.resident import most_rows
from jaxsparse.state import EmbeddingState
from jaxsparse.store import RowStore
from jaxsparse.store.contents import value_arrays

S = TypeVar("S")
"""A frozen dataclass and pytree with a field ``embeddings``, such as `TrainState`."""


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
    check_store(emb, store)
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
    saved, wanted = manifest["learning_rates"], specified_rates(emb)
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


def _below(prefix: str, values: Mapping[str, Array]) -> dict[str, Array]:
    return {n.removeprefix(prefix): value for n, value in values.items() if n.startswith(prefix)}


def _wanted(emb: EmbeddingCollection, template: Any) -> Mapping[str, Any]:
    leaves: dict[str, Any] = {}
    for array in table_arrays(emb, template.embeddings):
        name = leaf_name(array.block.spec.name, array.name)
        leaves[name] = [list(array.shape), str(array.dtype)]
    for name, table in emb.stored_tables.items():
        for array_name, (shape, dtype) in value_arrays(emb.layout.find(name)[0]).items():
            leaves[leaf_name(name, array_name)] = [[most_rows(table), *shape], str(dtype)]
    for name, leaf in small_leaves(template).items():
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
