# SPDX-License-Identifier: Apache-2.0
"""The rows of one table that are not on the devices: in the host's memory, and on disks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from jaxsparse.store.early_rows import EarlyRows
from jaxsparse.store.growing import grown
from jaxsparse.store.hotness import coldest
from jaxsparse.store.ram import RamRows
from jaxsparse.store.row_copy import copy_rows
from jaxsparse.store.ssd import NoSpaceError, SegmentStore
from jaxsparse.store.tier_clock import TierClock

Rows = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint32]
Keys = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

NOWHERE = -1
"""Location of a row that is not on a disk."""

SPILL_SHARE = 64
"""Full memory gives one row in so many to the disks at least: finding them is a pass over all."""

MAX_GARBAGE = 0.5
"""Share of released rows on the disks from which segments are rewritten."""


@dataclasses.dataclass
class Reading:
    """Rows that are being read into ``out``."""

    out: Words
    places: Places
    """Where those go that come from a disk."""
    coming: Future[npt.NDArray[np.uint8]] | None
    early: EarlyRows
    early_at: Places
    """Which of ``early`` are asked for."""
    early_places: Places
    """Where these go."""
    later: Rows
    """Rows that were not here yet."""
    later_places: Places


class HostRows:
    """Rows by number, with all their words; the coldest go to disks when memory is full."""

    def __init__(
        self, num_rows: int, num_words: int, host_rows: int | None, disks: SegmentStore | None
    ) -> None:
        """Starts empty.

        Args:
            num_rows: the most the table can have.
            num_words: of a row.
            host_rows: most rows in memory; None is no limit.
            disks: where the others go.
        """
        self.disks = disks
        # Addresses for all: when a disk is full, rows on their way there stay in memory.
        self.ram = RamRows(num_rows, num_words)
        self._limit = num_rows if host_rows is None else host_rows
        self._row_bytes = 4 * num_words
        self._location = np.zeros(0, np.int64)
        # By slot in memory; of no use without disks.
        self._worth = np.zeros(0, np.float32)
        self._early = EarlyRows()
        self.moved = {"ram_read": 0, "ram_written": 0, "ssd_read": 0, "ssd_written": 0}
        """Bytes by tier and direction."""
        self.clock = TierClock()
        """Of the thread that reads and puts, by ``ram`` and ``ssd``."""

    @property
    def nbytes(self) -> int:
        """Memory in use, that of the disks' own index aside."""
        return self.ram.nbytes + self._location.nbytes + self._worth.nbytes

    def holds(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of rows ``[n]`` are here."""
        return self.ram.holds(rows) | self.on_disk(rows)

    def on_disk(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of rows ``[n]`` are on a disk."""
        found: npt.NDArray[np.bool_] = self._locations(rows) != NOWHERE
        return found

    def read(self, rows: Rows) -> Words:
        """Words ``[n, W]`` of rows that are here.

        Raises:
            StoreError: a disk cannot be read, or a row there is damaged.
        """
        words = np.empty((rows.size, self.ram.num_words), np.uint32)
        self.finish(self.start(rows, words, np.arange(rows.size)))
        return words

    def start(self, rows: Rows, out: Words, places: Places) -> Reading:
        """Begins to read rows; those that are not here may come before `finish`.

        Args:
            rows: ``[n]``. Nobody changes those that are here meanwhile; they may move.
            out: ``[m, W]`` gets their words.
            places: ``[n]`` where in ``out``.
        """
        locations = self._locations(rows)
        on_disk = locations != NOWHERE
        in_ram = self.ram.holds(rows)
        is_early, early_at = self._early.find(locations)
        now = on_disk & ~is_early
        coming = self._read_disks(locations[now])
        with self.clock.busy("ram"):
            self.ram.read_into(rows[in_ram], out, places[in_ram])
        self.moved["ram_read"] += int(in_ram.sum()) * self._row_bytes
        later = ~(on_disk | in_ram)
        early = self._early, early_at, places[is_early]
        return Reading(out, places[now], coming, *early, rows[later], places[later])

    def read_early(self, rows: Rows) -> None:
        """Begins to read those of distinct ``rows`` that are on a disk, for the `start` after the
        next one: disks work on while nobody knows yet who is read. Those of the call before that
        nobody has asked for are forgotten."""
        locations = self._locations(rows)
        locations = np.sort(locations[locations != NOWHERE])
        self._early = EarlyRows(locations, self._read_disks(locations), self.disks)

    def forget_early(self) -> None:
        """Nobody asks for what `read_early` has read."""
        self._early = EarlyRows()

    def _read_disks(self, locations: npt.NDArray[np.int64]) -> Future[npt.NDArray[np.uint8]] | None:
        if not locations.size:
            return None
        assert self.disks is not None
        self.moved["ssd_read"] += locations.size * self._row_bytes
        return self.disks.read_ahead(locations)

    def finish(self, reading: Reading) -> None:
        """Waits until all rows are read.

        Raises:
            StoreError: a disk cannot be read, or a row there is damaged.
        """
        if reading.later.size:
            assert self.holds(reading.later).all(), "rows that come have landed"
            self.finish(self.start(reading.later, reading.out, reading.later_places))
        if reading.coming is not None:
            with self.clock.busy("ssd"):
                words = reading.coming.result().view(np.uint32)
                copy_rows(reading.out, reading.places, words, None)
        if reading.early_at.size:
            with self.clock.busy("ssd"):
                reading.early.copy(reading.early_at, reading.out, reading.early_places)

    def put(
        self,
        rows: Rows,
        words: Words,
        worth: npt.NDArray[np.float32],
        keys_of: Callable[[Rows], Keys],
    ) -> None:
        """Takes distinct rows that are not here.

        Args:
            rows: ``[n]``.
            words: ``[n, W]``.
            worth: ``[n]``; of rows in memory and these the least go to the disks. It must not
                change while a row is here.
            keys_of: keys of rows, which the disks keep beside them.

        Raises:
            NoSpaceError: a disk is full; the rows are here, in memory beyond its limit.
        """
        excess = len(self.ram) + rows.size - self._limit
        if excess <= 0 or self.disks is None:
            self._keep(rows, words, worth)
            return
        slots = self.ram.slots()
        count = min(max(excess, self._limit // SPILL_SHARE), slots.size + rows.size)
        chosen = coldest(np.concatenate([self._worth[slots], worth]), count)
        from_ram = self.ram.rows_at(slots[chosen[chosen < slots.size]])
        direct = np.sort(chosen[chosen >= slots.size]) - slots.size
        stays = np.delete(np.arange(rows.size), direct)
        try:
            self._append(rows[direct], keys_of(rows[direct]), words.take(direct, axis=0))
        except NoSpaceError:
            self._keep(rows, words, worth)
            raise
        self._keep(rows[stays], words, worth[stays], stays)
        with self.clock.busy("ram"):
            spilled = self.ram.read(from_ram)
        self._append(from_ram, keys_of(from_ram), spilled)
        self.ram.drop(from_ram)

    def drop(self, rows: Rows) -> None:
        """Rows ``[n]``, distinct, are no longer here; others of them never were."""
        self.ram.drop(rows)
        locations = self._locations(rows)
        found = locations != NOWHERE
        if found.any():
            assert self.disks is not None
            self._location[rows[found]] = NOWHERE
            self.disks.release(locations[found])

    def in_order(self, rows: Rows) -> Rows:
        """Distinct ``rows`` in the order in which they lie here; those that are not, last."""
        self.ram.holds(rows)
        slots = self.ram.slot[rows].astype(np.int64)
        locations = self._locations(rows)
        tier = np.where(slots != NOWHERE, 0, np.where(locations != NOWHERE, 1, 2))
        in_ram = tier == 0
        order: Rows = rows[np.lexsort((np.where(in_ram, slots, locations), tier))]
        return order

    def clear(self) -> None:
        """No row is here any more."""
        on_disk = np.flatnonzero(self._location != NOWHERE).astype(np.int32)
        self.drop(np.concatenate([self.ram.rows(), on_disk]))

    def tidy(self) -> None:
        """Rewrites segments of which little is left, once there is much garbage."""
        if self.disks is None:
            return
        live, garbage = self.disks.rows()
        if garbage <= MAX_GARBAGE * (garbage + live):
            return
        with self.clock.busy("ssd"):
            old, new = self.disks.compact(MAX_GARBAGE)
        order = np.argsort(old)
        rows = np.flatnonzero(self._location != NOWHERE)
        at = np.searchsorted(old, self._location[rows], sorter=order)
        at = order[np.minimum(at, max(old.size - 1, 0))] if old.size else at[:0]
        moved = old[at] == self._location[rows] if old.size else np.zeros(0, bool)
        self._location[rows[moved]] = new[at[moved]]

    def flush(self) -> None:
        """Makes rows on disks durable."""
        if self.disks is not None:
            self.disks.flush()

    def close(self) -> None:
        """Closes the disks."""
        if self.disks is not None:
            self.disks.close()

    def _locations(self, rows: Rows) -> npt.NDArray[np.int64]:
        if self.disks is None:
            return np.full(rows.size, NOWHERE, np.int64)
        self._location = grown(self._location, int(rows.max(initial=-1)) + 1, NOWHERE)
        return self._location[rows]

    def _keep(
        self,
        rows: Rows,
        words: Words,
        worth: npt.NDArray[np.float32],
        places: Places | None = None,
    ) -> None:
        with self.clock.busy("ram"):
            self.ram.write(rows, words, places)
        if self.disks is not None:
            slots = self.ram.slot[rows]
            self._worth = grown(self._worth, int(slots.max(initial=-1)) + 1, 0)
            self._worth[slots] = worth
        self.moved["ram_written"] += rows.size * self._row_bytes

    def _append(self, rows: Rows, keys: Keys, words: Words) -> None:
        if not rows.size:
            return
        assert self.disks is not None
        block = np.ascontiguousarray(words).view(np.uint8)
        self._locations(rows)
        with self.clock.busy("ssd"):
            self._location[rows] = self.disks.append(keys, block)
        self.moved["ssd_written"] += rows.size * self._row_bytes
