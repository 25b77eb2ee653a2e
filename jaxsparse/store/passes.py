# SPDX-License-Identifier: Apache-2.0
"""Passes over a dataset: planned and read ahead on threads, packed batch by batch."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.data.batch import Batch
from jaxsparse.data.prefetch import Prefetcher
from jaxsparse.packed_batch import PackedBatch, PreparedBatch
from jaxsparse.state import EmbeddingState
from jaxsparse.store.mover import Mover
from jaxsparse.store.pass_plan import PassPlan
from jaxsparse.store.planner import Planner
from jaxsparse.store.together import Together

Rows = npt.NDArray[np.int32]
Ready = tuple[Batch, PackedBatch] | PreparedBatch | None
Pack = Callable[[Any, dict[str, npt.NDArray[np.int64]]], Ready]

PACKED_AHEAD = 2
"""Batches packed ahead on a thread."""


class Pass:
    """Batches whose rows are on the devices once `RowStore.enter` has been called with it.

    Iterate over it once, after entering it: it yields `PackedBatch` objects.
    """

    def __init__(self, plan: PassPlan, run: PassRun) -> None:
        """Not entered yet."""
        self._plan, self._run = plan, run
        self.is_entered = False

    @property
    def facts(self) -> dict[str, Any]:
        """What the pass brings: ``batches``, ``new_keys``, ``evicted_keys``, distinct ``rows``,
        ``hit_rate`` (share of occurrences whose row was on the devices when it was planned), bytes
        between host and devices, and the seconds that training waited for its plan
        (``plan_wait_s``, of them ``data_wait_s`` for batches) and its rows (``row_wait_s``).

        Once it was entered also what its rows have cost: ``device_wait_s``, ``ram_wait_s`` and
        ``ssd_wait_s``, the parts of ``row_wait_s`` spent on rows that left the devices and on the
        host's tiers; ``ram_read_bytes`` and so on by tier and direction; ``garbage``, the share of
        the rows on disks that is released; and ``tables``, by table its size, rows by tier before
        the pass, and what happened since the pass before, as `RowStore.stats` counts it. Of several
        processes, waits, bytes by tier, rows by tier and garbage are those of this one."""
        return self._plan.facts

    def leaving(self, table: str) -> Rows:
        """Rows of a table that leave the devices for it."""
        return self._plan.moves[table].out_rows

    def __len__(self) -> int:
        """Batches."""
        return len(self._plan.batches)

    def __iter__(self) -> Iterator[PackedBatch]:
        """The batches, packed ahead.

        Raises:
            RuntimeError: the pass was not entered, or another one was since.
        """
        for _, packed in self.with_batches():
            yield packed

    def with_batches(self) -> Iterator[tuple[Batch, PackedBatch]]:
        """As iterating, with the batch that each was made of, of this process's samples."""
        batches = self._run.batches(self._plan)
        for _ in self._plan.batches:
            if not self.is_entered or not self._run.is_current(self):
                raise RuntimeError(
                    "a pass is iterated after state = store.enter(state, p), and before the next "
                    "one is entered: its rows are on the devices then only"
                )
            yield next(batches)


class PassRun:
    """The passes over one dataset, one after another.

    One thread plans and moves rows, in the order: plan of the next pass, reading of the rows on the
    host that come for it, landing of the rows that left for this one, reading of those among them
    that are wanted again at once.
    """

    def __init__(
        self,
        planner: Planner,
        mover: Mover,
        source: Prefetcher[Any],
        pack: Pack,
        worker: ThreadPoolExecutor,
        together: Together | None,
    ) -> None:
        """Begins to plan the first pass.

        Args:
            planner: of the passes.
            mover: of the rows.
            source: of the batches, closed at the end.
            pack: makes batches ready, on a thread.
            worker: the one thread that plans and moves.
            together: what several processes do together; None for one.
        """
        self.planner, self._together = planner, together
        self._mover, self._source, self._worker = mover, source, worker
        self._plans: queue.SimpleQueue[PassPlan | None] = queue.SimpleQueue()
        self._pack = pack
        self._packer: Prefetcher[tuple[PassPlan, Ready]] = Prefetcher(
            self._to_pack(), self._packed, depth=PACKED_AHEAD
        )
        self._packed_batches = iter(self._packer)
        self._current: Pass | None = None
        self._waiting: Pass | None = None
        self._is_closed = False
        self._agree(None)
        self._start(None)

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""
        return self._is_closed

    def is_current(self, one: Pass) -> bool:
        """Whether ``one`` is the pass entered last."""
        return self._current is one

    def passes(self) -> Iterator[Pass]:
        """All passes.

        Raises:
            RuntimeError: the one before was not entered.
            StoreFullError, StoreError: what stopped the planning or the moving of rows.
        """
        try:
            while (plan := self._next_plan()) is not None:
                self._waiting = Pass(plan, self)
                self._plans.put(plan)
                yield self._waiting
                if self._waiting is not None:
                    raise RuntimeError(
                        "passes: a pass was left out; call state = store.enter(state, p) with each"
                    )
        finally:
            self.close()

    def _next_plan(self) -> PassPlan | None:
        start = time.perf_counter()
        plan = self._planned.result()
        if plan is None:
            error = self._moved.exception()
            if self._together is not None:
                self._together.raise_together(error)
            elif error is not None:
                raise error
        else:
            end = time.perf_counter()
            plan.facts["plan_wait_s"] = end - start
            plan.facts["data_wait_s"] = self.planner.clock.waited(start, end).get("data", 0.0)
            self.planner.clock.clear()
        return plan

    def wait_for_rows(self, one: Pass) -> None:
        """Waits until the rows of the pass that was given last are there.

        Raises:
            RuntimeError: it is another one.
        """
        if one is not self._waiting:
            raise RuntimeError(
                "enter: expected the pass that passes() gave last, once; its rows were planned for "
                "the state as the passes before leave it"
            )
        start = time.perf_counter()
        error = self._moved.exception()
        self._agree(error)
        end = time.perf_counter()
        one.facts["row_wait_s"] = end - start
        one.facts.update(self._mover.facts(start, end))

    def enter(self, state: EmbeddingState, one: Pass) -> EmbeddingState:
        """Crosses the boundary, once its rows are there, and lets the next pass be planned."""
        state = self._mover.cross(state, one._plan)
        one.is_entered = True
        self._current, self._waiting = one, None
        self._start(one._plan)
        return state

    def _agree(self, error: BaseException | None) -> None:
        """Before the next pass is planned; of several processes it needs the keys of all.

        Raises:
            Exception: ``error``, or that some process has one.
        """
        if self._together is not None:
            self._together.exchange(self.planner, error)
        elif error is not None:
            raise error

    def _start(self, before: PassPlan | None) -> None:
        self._planned: Future[PassPlan | None] = self._worker.submit(self.planner.next)
        self._moved: Future[None] = self._worker.submit(self._move, self._planned, before)

    def _move(self, planned: Future[PassPlan | None], before: PassPlan | None) -> None:
        """Behind the planning, on the same thread."""
        if before is not None:
            self._mover.drop_arrived(before)
        evicted = self._drop_evicted()
        plan = None if planned.exception() else planned.result()
        # Disks read while rows land.
        readings = []
        if plan is not None:
            readings = self._mover.start_fetch(plan)
            self._mover.read_early(self.planner.next_rows, plan)
        if before is not None:
            self._mover.land(before, evicted)
        self._mover.finish_fetch(readings)

    def _drop_evicted(self) -> dict[str, Rows]:
        evicted = {}
        for name, parts in self.planner.evicted.items():
            if parts:
                evicted[name] = np.unique(np.concatenate(parts))
                self.planner.evicted[name] = []
                self._mover.drop(name, evicted[name])
        return evicted

    def end(self) -> None:
        """Plans no further pass, in any process, as soon as all know of it."""
        if self._together is not None:
            self._together.ends = True
        else:
            self.planner.is_ended = True

    def settle(self) -> None:
        """Waits until no thread moves rows or changes what is known of them."""
        self._planned.exception()
        self._moved.exception()

    def close(self) -> None:
        """Ends the threads; a pass that was planned and not entered is given up."""
        if self._is_closed:
            return
        self._is_closed = True
        self.settle()
        plan = None if self._planned.exception() else self._planned.result()
        if plan is not None and not (self._current and self._current._plan is plan):
            self._mover.cancel(plan)
        self._mover.forget_early()
        self._plans.put(None)
        self._packer.close()
        self._source.close()

    def batches(self, plan: PassPlan) -> Iterator[tuple[Batch, PackedBatch]]:
        """The batches of a pass, of this process's samples; in several processes a collective."""
        ready = self._ready(plan)
        if self._together is not None:
            yield from self._together.batches(item for item in ready if item is not None)
            return
        for item in ready:
            assert isinstance(item, tuple), "packed where one process has the mesh"
            yield item

    def _ready(self, plan: PassPlan) -> Iterator[Ready]:
        """Those of passes before it are left out."""
        left = len(plan.batches)
        while left:
            of, ready = next(self._packed_batches)
            if of is plan:
                left -= 1
                yield ready

    def _to_pack(self) -> Iterator[tuple[PassPlan, int]]:
        while (plan := self._plans.get()) is not None:
            for number in range(len(plan.batches)):
                yield plan, number

    def _packed(self, item: tuple[PassPlan, int]) -> tuple[PassPlan, Ready]:
        plan, number = item
        return plan, self._pack(*plan.batches[number])
