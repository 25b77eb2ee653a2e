# SPDX-License-Identifier: Apache-2.0
"""Moves the rows of a pass: from the host to a block, across the boundary, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.ops.packing.native import aligned_empty
from jaxsparse.processes import local_block, put_blocks
from jaxsparse.state import EmbeddingState
from jaxsparse.store.host_rows import HostRows, Reading
from jaxsparse.store.pass_plan import PassPlan, SlabSwap
from jaxsparse.store.residency import NOWHERE
from jaxsparse.store.row_format import to_words
from jaxsparse.store.swap import cut_of, make_rows, put_rows, take_rows
from jaxsparse.store.table_store import TableStore
from jaxsparse.store.tier_clock import TIERS, TierClock

Rows = npt.NDArray[np.int32]

TIDY_EVERY = 64
"""Passes between looks at how much of the disks is garbage."""


class Mover:
    """Rows of all tables; fetched and landed on one thread, `cross` is for the main one."""

    def __init__(self, emb: EmbeddingCollection, tables: Mapping[str, TableStore]) -> None:
        """Moves nothing yet."""
        self._emb, self._tables = emb, tables
        self._clock = TierClock()
        self._moved: dict[str, int] = {}
        # Over all runs of passes: one may have few, such as those up to a save.
        self._num_landed = 0

    def facts(self, waited_from: float, waited_to: float) -> dict[str, Any]:
        """What the rows of a pass have cost once they are there; the mover's thread rests.

        Args:
            waited_from: when training began to wait for them (``time.perf_counter``).
            waited_to: when they were there.

        Returns:
            Seconds of that by the tier that was waited for, and bytes by tier and direction since
            the call before.
        """
        clocks = [self._clock, *(store.host.clock for store in self._tables.values())]
        waits = dict.fromkeys(TIERS, 0.0)
        for clock in clocks:
            for tier, seconds in clock.waited(waited_from, waited_to).items():
                waits[tier] += seconds
            clock.clear()
        before, self._moved = self._moved, self.bytes_moved()
        return {
            **{f"{tier}_wait_s": seconds for tier, seconds in waits.items()},
            **{name: count - before.get(name, 0) for name, count in self._moved.items()},
        }

    def bytes_moved(self) -> dict[str, int]:
        """Bytes of all tables by tier and direction, so far; waits for nothing."""
        totals: dict[str, int] = {}
        for store in self._tables.values():
            for way, count in store.host.moved.items():
                totals[f"{way}_bytes"] = totals.get(f"{way}_bytes", 0) + count
        return totals

    def _note_tiers(self, plan: PassPlan) -> None:
        all_rows = all_garbage = 0
        for name, store in self._tables.items():
            disks = store.host.disks
            live, garbage = (0, 0) if disks is None else disks.rows()
            all_rows, all_garbage = all_rows + live + garbage, all_garbage + garbage
            names = ("device_rows", "host_rows", "ssd_rows")
            plan.facts["tables"][name] |= dict(zip(names, store.tier_rows(), strict=True))
        plan.facts["garbage"] = all_garbage / max(all_rows, 1)

    def start_fetch(self, plan: PassPlan) -> list[tuple[HostRows, Reading]]:
        """Begins to read the rows that come from the host, into blocks; those that have left the
        devices and not landed yet are read by `finish_fetch`.

        A block is a new array each time: on CPUs programs read it where it is. Notes how many rows
        each tier has before the pass is entered.
        """
        self._note_tiers(plan)
        readings = []
        for swap in plan.swaps:
            if swap.coming.is_empty:
                continue
            words = self._tables[swap.tables[0]].host.ram.num_words
            swap.words = aligned_empty((swap.coming.rows.size, words), np.uint32)
            for number, (name, places) in enumerate(
                zip(swap.tables, swap.coming.places, strict=True)
            ):
                host = self._tables[name].host
                rows = swap.coming.own(number, plan.moves[name].in_rows)
                if rows.size:
                    reading = host.start(rows, swap.words, places)
                    readings.append((host, reading))
        return readings

    def finish_fetch(self, readings: list[tuple[HostRows, Reading]]) -> None:
        """Waits until the rows are there.

        Raises:
            StoreError: a disk cannot be read, or a row there is damaged.
        """
        for host, reading in readings:
            host.finish(reading)

    def cross(self, state: EmbeddingState, plan: PassPlan) -> EmbeddingState:
        """Dispatches the programs of the boundary; the state is donated.

        From here on rows are where the plan wants them.
        """
        slabs, slots = list(state.slabs), list(state.slots)
        for swap in plan.swaps:
            index = swap.index
            slabs[index], slots[index] = self._cross(swap, slabs[index], slots[index], state)
        for name, moves in plan.moves.items():
            self._tables[name].residency.commit(moves)
        return dataclasses.replace(state, slabs=tuple(slabs), slots=tuple(slots))

    def _cross(self, swap: SlabSwap, slab: Any, slots: Any, state: EmbeddingState) -> Any:
        emb, index = self._emb, swap.index
        if not swap.leaving.is_empty:
            swap.left = take_rows(emb, index, slab, slots, self._put(index, swap.leaving.rows))
            for part in swap.left.values():
                part.copy_to_host_async()
        if not swap.coming.is_empty:
            arrays = self._put(index, (swap.coming.rows, swap.words))
            slab, slots = put_rows(emb, index, slab, slots, *arrays)
        if not swap.new.is_empty:
            arrays = self._put(index, (swap.new.rows, *swap.new_numbers))
            slab, slots = make_rows(emb, index, slab, slots, state.init_words, *arrays)
        return slab, slots

    def _put(self, index: int, arrays: Any) -> Any:
        cut = cut_of(self._emb, index)
        return put_blocks(arrays, self._emb.mesh, jax.tree.map(lambda _: cut, arrays))

    def drop(self, table: str, rows: Rows) -> None:
        """Rows of a table that were given up are no longer on the host."""
        self._tables[table].host.drop(rows)

    def drop_arrived(self, plan: PassPlan) -> None:
        """Rows that came with a pass that was entered are no longer on the host. Apart from
        `cross`, where training waits."""
        for name, moves in plan.moves.items():
            self.drop(name, moves.in_rows)

    def read_early(self, rows: Mapping[str, Rows], planned: PassPlan) -> None:
        """Begins to read rows that the pass behind ``planned`` wants, and that are on a disk still
        when ``planned`` is entered; see `HostRows.read_early`.

        Args:
            rows: by table, distinct.
            planned: `start_fetch` was called with it.
        """
        for name, wanted in rows.items():
            places = self._tables[name].residency.places_after(wanted, planned.moves[name])
            self._tables[name].host.read_early(wanted[places == NOWHERE])

    def forget_early(self) -> None:
        """Nobody asks for what `read_early` has read."""
        for store in self._tables.values():
            store.host.forget_early()

    def cancel(self, plan: PassPlan) -> None:
        """A pass is not entered: rows stay where they are."""
        for name, moves in plan.moves.items():
            self._tables[name].residency.cancel(moves)

    def land(self, plan: PassPlan, evicted: Mapping[str, Rows]) -> None:
        """Takes in the rows that left when the pass was entered.

        Args:
            plan: of the pass.
            evicted: by table, rows that nobody wants any more.

        Raises:
            StoreError: a disk is full or cannot be written; the rows are in memory.
        """
        for swap in plan.swaps:
            if swap.left is None:
                continue
            slab = self._emb.layout.slabs[swap.index]
            with self._clock.busy("device"):
                left = {name: local_block(part) for name, part in swap.left.items()}
            swap.left = None
            for number, (name, places) in enumerate(
                zip(swap.tables, swap.leaving.places, strict=True)
            ):
                store = self._tables[name]
                rows = swap.leaving.own(number, plan.moves[name].out_rows)
                if not rows.size:
                    continue
                block = to_words(slab, left, places)
                if name in evicted:
                    stays = ~np.isin(rows, evicted[name])
                    rows, block = rows[stays], block[stays]
                if rows.size:
                    worth = store.known.worth(rows)
                    store.host.put(rows, block, worth, store.known.index.keys_of)
        self._num_landed += 1
        if self._num_landed % TIDY_EVERY == 0:
            for store in self._tables.values():
                store.host.tidy()
