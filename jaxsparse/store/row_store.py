# SPDX-License-Identifier: Apache-2.0
"""`RowStore`: the rows of tables whose keys come and go, or do not fit the devices."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse import checks
from jaxsparse.agreement import raise_together
from jaxsparse.data.batch import Batch
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.processes import is_shared
from jaxsparse.specs import is_positive_int
from jaxsparse.state import EmbeddingState
from jaxsparse.store.access import StoredRows
from jaxsparse.store.batch_stream import BatchStreams
from jaxsparse.store.census import Census
from jaxsparse.store.contents import StoreContents, census_of, table_contents
from jaxsparse.store.mover import Mover
from jaxsparse.store.passes import Pass, PassRun
from jaxsparse.store.planner import MAX_BATCHES, Planner
from jaxsparse.store.reading_planner import ReadingPlanner
from jaxsparse.store.refill import check_room, refill
from jaxsparse.store.saved_table import SavedTable
from jaxsparse.store.table_store import TableStore
from jaxsparse.store.training_planner import TrainingPlanner, give_up_keys, give_up_rows
from jaxsparse.store.translate import key_words

Array = npt.NDArray[Any]


class RowStore:
    """Brings the rows of each pass to the devices, and takes others back.

    Needed for tables with `Dynamic` keys or `Tiers`. The only mutable object of a run: it knows
    the tables' keys and where each row is. It goes with one `EmbeddingState`, handed from call to
    call as everywhere; a state that was passed to `enter` or `write` is donated.

    On a mesh that several processes share, each has a store, and all call the same methods in the
    same order, from the thread that trains. `passes` takes a process's own samples; one that has
    fewer batches goes on with empty ones. `read`, `read_slots`, `read_words`, `write`, `keys` and
    `evict` take the same arguments everywhere and answer for the whole table; all that touch rows
    are collectives, and what keeps one process from going on is raised by all. `stats` counts keys
    and occurrences of the whole job, rows by tier and bytes of this process; `census` and
    `bytes_moved` tell of the rows that this process has. `contents` and `refill` refuse.

    >>> import jax, jaxsparse as js
    >>> user = js.TableSpec("user", embedding_dim=4, keys=js.Dynamic(1000))
    >>> emb = js.EmbeddingCollection([js.FeatureSpec("who", user)], mesh=js.make_mesh())
    >>> state = emb.init(jax.random.key(0))
    >>> store = js.RowStore(emb, state)
    >>> batches = [js.Batch({"who": np.array([2**62, 7])}, labels=np.zeros(2))]
    >>> for p in store.passes(batches):
    ...     state = store.enter(state, p)
    ...     for batch in p:
    ...         acts, res = emb.lookup(state, batch.ids)
    ...         state = emb.update(state, res, acts, step=0)
    >>> store.keys("user").tolist(), store.read(state, "user", [7]).shape
    ([7, 4611686018427387904], (1, 4))
    >>> store.close()
    """

    def __init__(
        self,
        emb: EmbeddingCollection,
        emb_state: EmbeddingState,
        *,
        direct_io: bool = False,
        discard_rows: bool = False,
    ) -> None:
        """Starts without keys.

        Args:
            emb: the collection.
            emb_state: from its `init`; new rows are drawn from the key it was made with.
            direct_io: read disks past the page cache.
            discard_rows: delete what an earlier store has left in the folders of a table's
                ``Tiers(ssd=)``, such as that of a run that was killed; otherwise it is an error.

        Raises:
            ValueError: the collection has no table for a store, or the state is not its.
            StoreError: a folder of a table's ``Tiers(ssd=)`` cannot be used.
            RuntimeError: it cannot in another process.
        """
        if not emb.stored_tables:
            raise ValueError(
                "RowStore: no table has Dynamic keys or tiers; emb.pack, read and write do without"
            )
        checks.check_state(emb_state, emb.layout_fingerprint)
        self.emb = emb
        self._tables: dict[str, TableStore] = {}
        error: BaseException | None = None
        try:
            for name, spec in emb.stored_tables.items():
                self._tables[name] = TableStore(emb, spec, direct_io, discard_rows)
        except BaseException as failed:
            error = failed
        try:
            raise_together(emb.mesh, error)
        except BaseException:
            self._close_tables()
            raise
        self._mover = Mover(emb, self._tables)
        self._access = StoredRows(emb, np.array(emb_state.init_words))
        self._worker = ThreadPoolExecutor(1, "jaxsparse-rows")
        self._streams = {train: BatchStreams(emb) for train in (True, False)}
        self._run: PassRun | None = None
        self._step = 0
        self._is_closed = False
        # Held by whoever looks at the tables or changes them, but for the store's own thread,
        # which is waited for. Other threads than the one that trains may read and evict.
        self._lock = threading.RLock()

    def passes(
        self,
        dataset: Iterable[Batch],
        train: bool = True,
        batches_per_pass: int | None = None,
        *,
        time: Callable[[Batch], float] | None = None,
    ) -> Iterator[Pass]:
        """Groups the batches of a dataset into passes, planned and read ahead on threads.

        Call ``state = store.enter(state, p)`` with each, then iterate over it. Batches keep their
        order, and results do not depend on the grouping.

        Args:
            dataset: yields `Batch`, of this process's samples; iterated once, on a thread.
            train: False for evaluation and prediction: no key gets a row, nothing is counted, and
                a key without a row reads its initial (or the default) row.
            batches_per_pass: None lets a pass have up to 16, as long as its rows fill at most
                half of each table's places on the devices. Passes are cut where rows do not fit.
            time: the time of a batch's data in seconds, for ``TTL(seconds=)``; that of the
                processes' batches of one step is the latest of theirs.

        Raises:
            StoreFullError: before the pass is entered: one batch needs more rows than a table has,
                in all or on the devices (in several processes: those of the process that owns the
                rows); the table, need and have are named.
            ValueError, TypeError: a batch is invalid.
            RuntimeError: passes are under way.
        """
        self._check_open()
        if batches_per_pass is not None and not is_positive_int(batches_per_pass):
            raise ValueError(
                f"passes: batches_per_pass must be a positive int or None, got {batches_per_pass!r}"
            )
        timed = [name for name, store in self._tables.items() if store.known.needs_times]
        if train and timed and time is None:
            raise ValueError(
                f"passes: tables {timed} have TTL(seconds=): give time=, from a batch to the time "
                "of its data in seconds"
            )
        self._check_free("passes")
        return self._passes(dataset, train, batches_per_pass, time)

    def _passes(
        self, dataset: Iterable[Batch], train: bool, most: int | None, time: Any
    ) -> Iterator[Pass]:
        depth = 2 * (most or MAX_BATCHES)
        stream = self._streams[train].start(dataset, time if train else None, depth)
        planner: Planner
        if train:
            planner = TrainingPlanner(self.emb, self._tables, stream.asked, most, self._step)
        else:
            planner = ReadingPlanner(self.emb, self._tables, stream.asked, most)
        with self._lock:
            self._check_free("passes")
            run = PassRun(
                planner, self._mover, stream.source, stream.pack, self._worker, stream.together
            )
            self._run = run
        try:
            yield from run.passes()
        finally:
            with self._lock:
                run.close()
                if isinstance(planner, TrainingPlanner):
                    self._step = planner.step
                    for name, parts in planner.to_evict.items():
                        for words in parts:
                            self._evict_now(name, words)

    def end_passes(self) -> None:
        """Plans no further pass: `passes` ends behind those that are planned.

        From any thread. The batches behind them are not looked at, though some may have been drawn
        from the dataset.
        """
        run = self._run
        if run is not None:
            run.end()

    def enter(self, emb_state: EmbeddingState, p: Pass) -> EmbeddingState:
        """Brings the rows of a pass to the devices; call it from the thread that trains.

        Args:
            emb_state: as the passes before left it; donated.
            p: the pass that `passes` gave last.

        Returns:
            The state for the batches of ``p``.

        Raises:
            StoreError: a disk could not be read or written; nothing was changed.
            RuntimeError: ``p`` is another pass, or another process could not go on.
        """
        self._check_open()
        checks.check_state(emb_state, self.emb.layout_fingerprint)
        if self._run is None:
            raise RuntimeError("enter: there is no pass; iterate over store.passes(dataset)")
        run = self._run
        with self._lock:
            run.wait_for_rows(p)
            if isinstance(run.planner, TrainingPlanner):
                self._give_up_small_rows(emb_state, run.planner, p)
            return run.enter(emb_state, p)

    def read(self, emb_state: EmbeddingState, table: str, keys: npt.ArrayLike) -> Array:
        """Rows ``[n, D]`` by key, wherever they are; changes nothing.

        A key without a row gives what a lookup would: its initial row, or the default row of a
        table that admits keys.
        """
        with self._lock:
            store, words = self._find(emb_state, table, keys)
            return self._access.read_column(emb_state, store, words, "")

    def read_slots(
        self, emb_state: EmbeddingState, table: str, keys: npt.ArrayLike
    ) -> dict[str, Array]:
        """Slot variables ``[n, D]`` or ``[n]`` by key; as `read`, which see."""
        with self._lock:
            store, words = self._find(emb_state, table, keys)
            return self._access.read_slots(emb_state, store, words)

    def read_words(
        self, emb_state: EmbeddingState, table: str, words: npt.NDArray[np.uint64]
    ) -> Array:
        """As `read`, by the 64 bits a table knows its keys by."""
        with self._lock:
            store = self._table(table)
            self._settle()
            return self._access.read_column(emb_state, store, words, "")

    def bytes_moved(self) -> dict[str, int]:
        """Bytes of all tables by tier and direction, so far; waits for nothing."""
        return self._mover.bytes_moved()

    def write(
        self, emb_state: EmbeddingState, table: str, keys: npt.ArrayLike, rows: npt.ArrayLike
    ) -> EmbeddingState:
        """Overwrites rows by key; slots stay. Keys without a row get one, whatever the admission.

        Args:
            emb_state: the state, donated.
            table: its name.
            keys: ``[n]``, distinct.
            rows: ``[n, D]`` finite float32.

        Raises:
            ValueError: shapes, values or keys are invalid, or the table is full.
            RuntimeError: passes are under way: rows that were read ahead would be missed.
        """
        with self._lock:
            store, words = self._find(emb_state, table, keys)
            self._check_free(f"write {table!r}")
            return self._access.write(emb_state, store, words, rows, self._step)

    def keys(self, table: str) -> npt.NDArray[np.uint64]:
        """All keys that have a row, ascending, as their 64 bits: row numbers of a table that is
        not `Dynamic`. While passes are under way, those of the batches planned so far."""
        with self._lock:
            store = self._table(table)
            self._settle()
            index = store.known.index
            return np.sort(index.keys_of(index.rows()))

    def evict(self, table: str, keys: npt.ArrayLike) -> int:
        """Takes keys their rows; the next time they are as new.

        While passes are under way they go before the next pass that is planned.

        Returns:
            How many of ``keys`` have a row now.
        """
        store = self._table(table)
        words = np.unique(key_words(store.spec, keys)[0])
        with self._lock:
            self._settle()
            found = int((store.known.index.find(words) >= 0).sum())
            run = self._run
            if run is not None and not run.is_closed and isinstance(run.planner, TrainingPlanner):
                run.planner.to_evict[table].append(words)
            else:
                self._check_free(f"evict {table!r}")
                self._evict_now(table, words)
        return found

    def _evict_now(self, table: str, keys: npt.NDArray[np.uint64]) -> None:
        store = self._tables[table]
        store.host.drop(give_up_keys(store, keys))

    def _give_up_small_rows(
        self, emb_state: EmbeddingState, planner: TrainingPlanner, p: Pass
    ) -> None:
        """`L2Norm` at the boundary: no thread is at work, and the pass to come is known."""
        for name, store in self._tables.items():
            rows = self._access.small_rows(emb_state, store)
            if rows.size:
                stays = planner.reads(name, rows) | np.isin(rows, p.leaving(name))
                give_up_rows(store, rows[~stays])
                store.host.drop(rows[~stays])

    def flush(self, emb_state: EmbeddingState) -> None:
        """Waits for rows under way, and makes those on disks durable; changes no value."""
        self._check_open()
        checks.check_state(emb_state, self.emb.layout_fingerprint)
        error = None
        with self._lock:
            self._settle()
            try:
                for store in self._tables.values():
                    store.host.flush()
            except Exception as failed:
                error = failed
            raise_together(self.emb.mesh, error)

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Keeps the store as it is: other threads that would change or read it wait.

        Raises:
            RuntimeError: passes are under way: keys of batches to come have rows already.
        """
        self._check_open()
        with self._lock:
            self._check_free("save")
            yield

    def contents(self, emb_state: EmbeddingState) -> StoreContents:
        """All that the store and the state know of the tables, for a checkpoint.

        Reads no row yet, and changes nothing; valid inside one `still`.

        Raises:
            ValueError: several processes share the mesh.
            RuntimeError: as `still`.
        """
        checks.check_state(emb_state, self.emb.layout_fingerprint)
        self._check_one_process("contents")
        with self.still():
            tables = {
                name: table_contents(self._access, emb_state, store)
                for name, store in self._tables.items()
            }
            return StoreContents(self._step, tables)

    def check_room(self, saved: Mapping[str, SavedTable]) -> None:
        """Raises StoreFullError where a saved table is larger than the store's, by name."""
        for name, table in saved.items():
            check_room(self._table(name), table)

    def refill(
        self, emb_state: EmbeddingState, saved: Mapping[str, SavedTable], step: int | None
    ) -> EmbeddingState:
        """Takes in tables as they were saved, in the place of what the store has of them.

        Args:
            emb_state: donated; its ``init_words`` are what new rows are drawn from henceforth.
            saved: by name; other tables stay.
            step: batches trained when they were saved; None leaves the store's.

        Raises:
            StoreFullError: a table is too small; nothing was changed.
            ValueError: several processes share the mesh.
            RuntimeError: passes are under way.
        """
        self._check_one_process("refill")
        self.check_room(saved)
        checks.check_state(emb_state, self.emb.layout_fingerprint)
        with self._lock:
            self._check_free("refill")
            self._access = StoredRows(self.emb, np.array(emb_state.init_words))
            for name, table in saved.items():
                emb_state = refill(self.emb, emb_state, self._tables[name], table)
            if step is not None:
                self._step = step
        return emb_state

    def census(self, table: str) -> Census:
        """Which rows of a table are hot, and in which tier each lies; of this process's rows."""
        with self._lock:
            store = self._table(table)
            self._settle()
            return census_of(store)

    def stats(self) -> dict[str, dict[str, Any]]:
        """By table, since the store was made: ``size`` (keys with a row), ``lookups`` and
        ``hits`` (occurrences in training; whose row was on the devices when their pass was
        planned), ``inserts``, ``evictions``, ``admissions_refused`` and their rates (see
        `known_rows.rates`), rows and bytes by tier, bytes moved, and the index in use."""
        with self._lock:
            self._check_open()
            self._settle()
            return {name: store.stats() for name, store in self._tables.items()}

    def close(self) -> None:
        """Ends the threads and closes the disks. A second time does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._run is not None:
                self._run.close()
            self._worker.shutdown()
            self._close_tables()

    def _close_tables(self) -> None:
        for store in self._tables.values():
            store.host.close()

    def _table(self, table: str) -> TableStore:
        self._check_open()
        if table not in self._tables:
            raise ValueError(f"no table {table!r} in the store; its tables: {list(self._tables)}")
        return self._tables[table]

    def _find(
        self, emb_state: EmbeddingState, table: str, keys: npt.ArrayLike
    ) -> tuple[TableStore, npt.NDArray[np.uint64]]:
        """A table and the words of keys, nothing being under way."""
        store = self._table(table)
        checks.check_state(emb_state, self.emb.layout_fingerprint)
        try:
            words, taken = key_words(store.spec, keys)
        except (ValueError, TypeError) as error:
            raise type(error)(f"table {table!r}: {error}") from error
        if np.ndim(keys) != 1 or (taken is not None and not taken.all()):
            raise ValueError(
                f"table {table!r}: keys must be [n], each with a row, got shape {np.shape(keys)}"
            )
        self._settle()
        return store, words

    def _check_one_process(self, what: str) -> None:
        if is_shared(self.emb.mesh):
            raise ValueError(
                f"{what}: the rows of a store that several processes share cannot be saved and "
                "loaded yet; train in one process, or without checkpoint="
            )

    def _check_free(self, what: str) -> None:
        if self._run is not None and not self._run.is_closed:
            raise RuntimeError(
                f"{what}: passes are under way; take them to their end, or close() their iterator"
            )

    def _settle(self) -> None:
        if self._run is not None:
            self._run.settle()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("the RowStore is closed")
