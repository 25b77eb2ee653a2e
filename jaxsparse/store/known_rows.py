# SPDX-License-Identifier: Apache-2.0
"""The keys of one table that have rows: found, admitted, counted and given up, batch by batch.

What becomes of a batch depends on the batches before it alone, not on where rows lie or on how
batches are grouped: a table has the same keys under any set-up of tiers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.dynamic import TTL, Dynamic
from jaxsparse.resident import most_rows
from jaxsparse.specs import TableSpec
from jaxsparse.store.admission import make_admitter
from jaxsparse.store.errors import StoreFullError
from jaxsparse.store.eviction import Counters, expired, first_to_go
from jaxsparse.store.hotness import Hotness
from jaxsparse.store.index import KeyIndex, RowMarks, distinct_rows
from jaxsparse.store.saved_table import SavedTable

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]

NO_ROW = -1
"""In place of a row: the key has none."""


@dataclasses.dataclass
class Proposal:
    """What a batch would do to a table; nothing is changed yet."""

    distinct: Rows
    """``[u]`` rows that the batch's keys have."""
    counts: Rows | Counts
    """``[u]`` occurrences of each."""
    inverse: Rows
    """``[n]``: index into ``distinct`` of each occurrence; NO_ROW where it has none (yet)."""
    new_keys: Keys
    """``[m]`` distinct keys without a row, ascending."""
    new_counts: Counts
    """``[m]`` occurrences of each."""
    new_inverse: npt.NDArray[np.int64]
    """Index into ``new_keys`` of each occurrence without a row."""
    admitted: npt.NDArray[np.bool_]
    """``[m]``."""
    evicted: Rows
    """Rows that go before: expired ones and those a full table gives up."""
    num_lookups: int
    """Occurrences."""

    @property
    def num_rows(self) -> int:
        """Distinct rows the batch reads, a default row aside."""
        return self.distinct.size + int(self.admitted.sum())


class KnownRows:
    """Index, counters, admission and eviction of one table."""

    def __init__(self, spec: TableSpec) -> None:
        """Starts without a key."""
        keys = spec.keys
        self.name = spec.name
        self.capacity = most_rows(spec)
        self.eviction = keys.eviction if isinstance(keys, Dynamic) else None
        self.admitter = make_admitter(keys.admission if isinstance(keys, Dynamic) else None)
        self.index = KeyIndex(self.capacity)
        self.hotness = Hotness()
        self.counters = Counters(self.needs_times)
        self.marks = RowMarks()
        self.epoch = 0
        """Grows when rows are given up: rows found before may be others' now."""
        self.totals = {
            "inserts": 0,
            "evictions": 0,
            "admissions_refused": 0,
            "lookups": 0,
            "hits": 0,
        }
        self._told = dict(self.totals)

    @property
    def needs_times(self) -> bool:
        """Whether the time of the data decides on something."""
        return isinstance(self.eviction, TTL) and self.eviction.seconds is not None

    def __len__(self) -> int:
        """Keys with a row."""
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """Memory of index and counters."""
        parts = self.index, self.hotness, self.counters, self.admitter
        return sum(int(part.nbytes) for part in parts)

    def worth(self, rows: Rows) -> npt.NDArray[np.float32]:
        """`Counters.worth` of rows ``[n]`` that have keys."""
        return self.counters.worth(rows)

    def counted(self) -> dict[str, int]:
        """What came to `totals` since the last call."""
        before, self._told = self._told, dict(self.totals)
        return {what: count - before[what] for what, count in self.totals.items()}

    def take_in(self, saved: SavedTable, numbers: Rows) -> None:
        """Starts with what was known of a table when it was saved.

        Args:
            saved: the table; what it lacks starts from nothing.
            numbers: ``[n]`` its rows.
        """
        keys, free = saved.column("keys"), saved.extra("free")
        assert keys is not None
        free = np.zeros(0, np.int32) if free is None else free
        by_number = np.zeros(numbers.size + free.size, np.uint64)
        by_number[numbers] = keys
        self.index = KeyIndex.from_arrays(self.capacity, {"keys": by_number, "free": free})
        nothing = np.zeros(numbers.size, np.int32)
        counts, last, scores = (saved.column(name) for name in ("counts", "last", "hotness"))
        self.counters.take_in(
            numbers,
            by_number.size,
            nothing if counts is None else counts,
            nothing if last is None else last,
            saved.column("times") if self.needs_times else None,
        )
        weight = saved.facts.get("hotness_weight", 1.0)
        cold = np.zeros(numbers.size, np.float32)
        self.hotness.take_in(numbers, cold if scores is None else scores, weight)
        arrays = {name: saved.extra(name) for name in self.admitter.arrays()}
        if all(array is not None for array in arrays.values()):
            self.admitter.take_in(arrays)

    def propose(
        self, keys: Keys, rows: Rows, step: int, time: float, times_seen: Counts | None = None
    ) -> Proposal:
        """What a batch would do; the order of its occurrences does not matter.

        Args:
            keys: ``[n]`` of all occurrences.
            rows: ``[n]`` what the index finds.
            step: number of the batch.
            time: of its data, in seconds.
            times_seen: ``[n]`` where an entry stands for several occurrences.

        Raises:
            StoreFullError: it would need more rows than there are.
        """
        found = distinct_rows(rows, self.marks)
        gone = np.sort(expired(self.eviction, self.counters, found.rows, step, time))
        if gone.size:
            rows = np.where(np.isin(rows, gone), np.int32(NO_ROW), rows)
            found = distinct_rows(rows, self.marks)
        unknown = rows == NO_ROW
        new_keys, new_inverse, new_counts = np.unique(
            keys[unknown], return_inverse=True, return_counts=True
        )
        counts: Rows | Counts = found.counts
        if times_seen is not None:
            counts = summed(found.inverse, times_seen, found.rows.size)
            new_counts = summed(new_inverse, times_seen[unknown], new_keys.size)
        admitted = self.admitter.decide(new_keys, new_counts, step)
        evicted = np.concatenate([gone, self._make_room(int(admitted.sum()), found.rows, gone)])
        new = new_keys, new_counts, new_inverse
        num_lookups = rows.size if times_seen is None else int(times_seen.sum())
        return Proposal(found.rows, counts, found.inverse, *new, admitted, evicted, num_lookups)

    def _make_room(self, num_new: int, distinct: Rows, gone: Rows) -> Rows:
        """Rows that a full table gives up for ``num_new`` new ones."""
        need = len(self) - gone.size + num_new - self.capacity
        if need <= 0:
            return distinct[:0]
        have = f"{len(self):,} of its {self.capacity:,} rows are in use"
        if self.eviction is None:
            raise StoreFullError(
                f"table {self.name!r} is full: the batch brings {num_new:,} new keys, {have}; "
                "raise Dynamic(capacity=), or set eviction="
            )
        live = self.index.rows()
        # All but the rows of the batch itself.
        may_go = np.ones(self.index.high_water, bool)
        may_go[distinct], may_go[gone] = False, False
        candidates = live[may_go[live]]
        if candidates.size < need:
            raise StoreFullError(
                f"table {self.name!r} is too small for one batch: it needs "
                f"{distinct.size + num_new:,} rows at once, the table has {self.capacity:,}; raise "
                "Dynamic(capacity=) or use smaller batches"
            )
        return first_to_go(self.eviction, self.counters, candidates, need, self.capacity)

    def commit(self, batch: Proposal, step: int, time: float) -> tuple[Rows, Rows]:
        """Makes a batch's changes.

        Returns:
            Distinct rows ``[v]``, and the index of each occurrence's among them: NO_ROW for keys
            that were not admitted.
        """
        self.give_up(batch.evicted)
        new_keys = batch.new_keys[batch.admitted]
        new_rows = self.index.insert(new_keys)
        self.counters.grow(self.index.high_water)
        self.admitter.book(batch.new_keys, batch.new_counts, batch.admitted)
        inverse = batch.inverse
        if batch.new_keys.size:
            place = np.full(batch.new_keys.size, NO_ROW, np.int32)
            place[batch.admitted] = batch.distinct.size + np.arange(new_rows.size, dtype=np.int32)
            inverse[inverse == NO_ROW] = place[batch.new_inverse]
        distinct = np.concatenate([batch.distinct, new_rows])
        counts = np.concatenate([batch.counts, batch.new_counts[batch.admitted]])
        self.counters.add(distinct, counts, step, time)
        self.hotness.add(distinct, counts)
        self.totals["lookups"] += batch.num_lookups
        self.totals["inserts"] += new_rows.size
        self.totals["admissions_refused"] += int((~batch.admitted).sum())
        return distinct, inverse

    def add_keys(self, keys: Keys, step: int) -> Rows:
        """Rows of distinct keys ``[n]``; those that have none get one.

        Raises:
            StoreFullError: there is no room; nothing is given up for them.
        """
        is_new = self.index.find(keys) == NO_ROW
        need = len(self) + int(is_new.sum())
        if need > self.capacity:
            raise StoreFullError(
                f"table {self.name!r} is full: {int(is_new.sum()):,} new keys need {need:,} rows, "
                f"it has {self.capacity:,}; evict some, or raise Dynamic(capacity=)"
            )
        rows = self.index.insert(keys)
        self.counters.grow(self.index.high_water)
        self.counters.last[rows[is_new]] = step
        self.totals["inserts"] += int(is_new.sum())
        return rows

    def give_up(self, rows: Rows) -> None:
        """Rows lose their keys; the next keys that get them find them as new."""
        if not rows.size:
            return
        self.index.remove(rows)
        self.counters.forget(rows)
        self.hotness.forget(rows)
        self.epoch += 1
        self.totals["evictions"] += rows.size


def summed(inverse: npt.NDArray[Any], times_seen: Counts, size: int) -> Counts:
    """Occurrences ``[size]`` of distinct rows, of entries that stand for several.

    Args:
        inverse: ``[n]`` index of each entry's row, NO_ROW for none.
        times_seen: ``[n]`` occurrences of each.
        size: distinct rows.
    """
    has_row = inverse != NO_ROW
    # Sums below 2**53 are exact.
    counts = np.bincount(inverse[has_row], times_seen[has_row], minlength=size)
    return counts.astype(np.int64)


def rates(counts: Mapping[str, int]) -> dict[str, float]:
    """What counts of a table say, as shares.

    Of occurrences those whose row was on the devices, those that brought a new row, and those for
    which one was given up; of keys without a row, counted once a batch, those that got one.

    >>> counts = {"lookups": 8, "hits": 6, "inserts": 1, "evictions": 0, "admissions_refused": 1}
    >>> list(rates(counts).values())
    [0.75, 0.125, 0.5, 0.0]
    """
    lookups = max(counts["lookups"], 1)
    asked = max(counts["inserts"] + counts["admissions_refused"], 1)
    return {
        "hit_rate": counts["hits"] / lookups,
        "insert_rate": counts["inserts"] / lookups,
        "admission_rate": counts["inserts"] / asked,
        "eviction_rate": counts["evictions"] / lookups,
    }
