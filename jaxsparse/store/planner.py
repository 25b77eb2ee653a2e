# SPDX-License-Identifier: Apache-2.0
"""Groups batches into passes, and decides which rows each pass finds on the devices."""

from __future__ import annotations

import abc
import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.store.blocks import make_block, spread_numbers
from jaxsparse.store.growing import grown
from jaxsparse.store.index import DistinctRows, distinct_rows
from jaxsparse.store.known_rows import NO_ROW, summed
from jaxsparse.store.pass_plan import PassPlan, SlabSwap
from jaxsparse.store.residency import NOWHERE, Moves
from jaxsparse.store.table_store import TableStore
from jaxsparse.store.tier_clock import TierClock
from jaxsparse.store.translate import Asked, Counts

Rows = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint64]
Codes = npt.NDArray[np.int64]

MAX_BATCHES = 16
"""Batches of a pass at most, unless the user says how many."""

MAX_SHARE = 0.5
"""Share of a table's places that the rows of a pass fill at most, unless the user says how many
batches it has: the other half is there for the rows of the next."""


@dataclasses.dataclass
class Looked:
    """A batch that was looked up ahead."""

    asked: Asked
    found: dict[str, tuple[int, Rows]]
    """By table: its epoch then, and a row for each entry."""


class Gathered:
    """Rows of one table that the batches of a pass need, so far.

    ``parts`` are distinct rows, ``sizes`` how many each owner has; ``batches`` distinct rows by
    batch, with the index of each entry's among them. In a pass that only reads, ``unknown`` are the
    distinct keys that get a row for this pass, ascending, and ``unknown_keys`` by batch those of
    the entries without a row.
    """

    def __init__(self, store: TableStore) -> None:
        """Starts with no pass."""
        self.store = store
        self._mark = np.zeros(0, np.int32)
        self._number = 0
        self.begin()

    def begin(self) -> None:
        """Forgets the pass before."""
        self._number += 1
        self.parts: list[Rows] = []
        self.batches: list[tuple[Rows, Rows]] = []
        self.unknown = np.zeros(0, np.uint64)
        self.unknown_keys: list[Keys] = []
        self.sizes = self.store.owners.counts(np.zeros(0, np.int32))
        self.hits = self.lookups = 0

    def marked(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` the pass has."""
        self._mark = grown(self._mark, int(rows.max(initial=-1)) + 1, 0)
        found: npt.NDArray[np.bool_] = self._mark[rows] == self._number
        return found

    def add(self, distinct: Rows, inverse: Rows) -> None:
        """Adds a batch: its distinct rows, and the index of each entry's."""
        fresh = distinct[~self.marked(distinct)]
        self._mark[fresh] = self._number
        self.parts.append(fresh)
        self.batches.append((distinct, inverse))
        self.sizes = self.sizes + self.store.owners.counts(fresh)

    def fresh(self, distinct: Rows) -> Counts:
        """By owner, how many of distinct rows the pass does not have yet."""
        return self.store.owners.counts(distinct[~self.marked(distinct)])

    def count(self, distinct: Rows, counts: Rows | Counts, num_lookups: int) -> None:
        """Counts occurrences whose row is on the devices now, when the pass is planned."""
        on_device = self.store.residency.places(distinct) != NOWHERE
        self.hits += int(counts[on_device].sum())
        self.lookups += num_lookups

    def needed(self) -> Rows:
        """All distinct rows of the pass."""
        return np.concatenate([np.zeros(0, np.int32), *self.parts])


class Planner(abc.ABC):
    """Makes one `PassPlan` after another from a stream of batches."""

    is_training: bool

    def __init__(
        self,
        emb: EmbeddingCollection,
        tables: Mapping[str, TableStore],
        source: Iterator[Asked],
        batches_per_pass: int | None,
    ) -> None:
        """Reads nothing yet."""
        self._emb, self._tables, self._source = emb, tables, source
        self._most = MAX_BATCHES if batches_per_pass is None else batches_per_pass
        self._share = MAX_SHARE if batches_per_pass is None else 1.0
        self._ahead: deque[Looked] = deque()
        self._gathered = {name: Gathered(store) for name, store in tables.items()}
        self.clock = TierClock()
        """Tells how long ``data`` were waited for."""
        self.is_ended = False
        """Set it for no further pass."""
        self.next_rows: dict[str, Rows] = {}
        """By table, distinct rows that the batches behind the last planned pass read, as far as
        they were looked at; those of new keys are not among them."""
        self.evicted: dict[str, list[Rows]] = {name: [] for name in tables}
        """Rows that have lost their keys, and may be on the host still; some have new keys."""

    def next(self) -> PassPlan | None:
        """The next pass; None when there are no more batches.

        Raises:
            StoreFullError: a batch needs more than there is; the table is named.
        """
        if self.is_ended:
            return None
        for gathered in self._gathered.values():
            gathered.begin()
        taken: list[Asked] = []
        while len(taken) < self._most and (looked := self._peek(0)) is not None:
            if not self._take(looked, is_first=not taken):
                break
            self._ahead.popleft()
            taken.append(looked.asked)
        if not taken:
            return None
        for number in range(len(taken)):
            self._peek(number)
        self.next_rows = {name: self._find_next(name, len(taken)) for name in self._tables}
        moves, codes = {}, {}
        for name, gathered in self._gathered.items():
            moves[name], codes[name] = self._place(gathered)
        batches = [
            (batch, {name: codes[name][i] for name in codes}) for i, batch in enumerate(taken)
        ]
        facts = {"batches": len(taken), **self._facts(moves)}
        swaps = self._swaps(moves)
        return PassPlan(batches, moves, swaps, facts)

    def reads(self, table: str, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` the last planned pass has."""
        return self._gathered[table].marked(rows)

    @abc.abstractmethod
    def _take(self, looked: Looked, is_first: bool) -> bool:
        """Adds a batch to the pass; False where it has to wait for the next one."""

    @abc.abstractmethod
    def _place(self, gathered: Gathered) -> tuple[Moves, list[Codes]]:
        """A table's part of the plan, and the codes of each batch."""

    def _rows(self, looked: Looked, name: str) -> Rows:
        """Row of each entry, or NO_ROW; what was found ahead is found no second time."""
        known = self._tables[name].known
        epoch, rows = looked.found.get(name, (-1, None))
        keys = looked.asked.keys[name]
        if rows is None or epoch != known.epoch:
            rows = known.index.find(keys)
        else:
            missing = np.flatnonzero(rows == NO_ROW)
            rows[missing] = known.index.find(keys[missing])
        looked.found[name] = known.epoch, rows
        return rows

    def _peek(self, number: int) -> Looked | None:
        """A batch that was not taken yet; None where there are not so many."""
        while len(self._ahead) <= number:
            with self.clock.busy("data"):
                asked = next(self._source, None)
            if asked is None:
                return None
            looked = Looked(asked, {})
            for name in self._tables:
                self._rows(looked, name)
            self._ahead.append(looked)
        return self._ahead[number]

    @property
    def num_ahead(self) -> int:
        """Batches that were looked up and belong to no pass yet; nothing is being planned."""
        return len(self._ahead)

    @property
    def num_wanted(self) -> int:
        """Batches that planning a pass looks at, at most: its own, and as many behind them."""
        return 2 * self._most

    def _limits(self, name: str) -> Counts:
        """Rows of a pass by owner, at most."""
        return (self._share * self._tables[name].residency.group_places).astype(np.int64)

    def _find_next(self, name: str, num_batches: int) -> Rows:
        known = self._tables[name].known
        found = [looked.found[name] for looked in list(self._ahead)[:num_batches]]
        # After rows were given up who has lost his is unknown; this is only a wish.
        rows = [rows for epoch, rows in found if epoch == known.epoch]
        return distinct_rows(np.concatenate([np.zeros(0, np.int32), *rows]), known.marks).rows

    def _swaps(self, moves: Mapping[str, Moves]) -> list[SlabSwap]:
        """The blocks of every stored slab that anything crosses the boundary of."""
        swaps = []
        for index, slab in enumerate(self._emb.layout.slabs):
            if not slab.is_stored:
                continue
            names = tuple(block.spec.name for block in slab.tables)
            stores = [self._tables[name] for name in names]
            parts = [moves[name] for name in names]
            pairs = list(zip(stores, parts, strict=True))
            emb = self._emb
            new = make_block(emb, index, [s.code_at[m.new_places] for s, m in pairs])
            swaps.append(
                SlabSwap(
                    index,
                    names,
                    make_block(emb, index, [s.code_at[m.out_places] for s, m in pairs]),
                    make_block(emb, index, [s.code_at[m.in_places] for s, m in pairs]),
                    new,
                    spread_numbers(new, [m.new_numbers for m in parts]),
                )
            )
        return swaps

    def _facts(self, plans: Mapping[str, Moves]) -> dict[str, Any]:
        gathered = self._gathered.values()
        moves = [(self._tables[name], part) for name, part in plans.items()]
        lookups = sum(one.lookups for one in gathered)
        return {
            "new_keys": sum(m.new_rows.size for _, m in moves if not m.is_lent),
            "evicted_keys": sum(rows.size for parts in self.evicted.values() for rows in parts),
            "rows": sum(int(one.sizes.sum()) for one in gathered),
            "hit_rate": sum(one.hits for one in gathered) / max(lookups, 1),
            "host_to_device_bytes": sum(m.in_rows.size * s.row_bytes for s, m in moves),
            "device_to_host_bytes": sum(m.out_rows.size * s.row_bytes for s, m in moves),
            "tables": {name: self._counts(name) for name in plans},
        }

    def _counts(self, name: str) -> dict[str, int]:
        """Keys with a row, and how often what happened to a table since the pass before."""
        known = self._tables[name].known
        more = known.counted() if self.is_training else dict.fromkeys(known.totals, 0)
        return {"size": len(known), **more}


def occurrences(found: DistinctRows, times_seen: Counts | None) -> tuple[Rows | Counts, int]:
    """How often each of the distinct rows occurs, and all occurrences, those without a row too.

    Args:
        found: of the entries of a batch.
        times_seen: ``[n]`` occurrences that each entry stands for; None where it is one.
    """
    if times_seen is None:
        return found.counts, found.inverse.size
    return summed(found.inverse, times_seen, found.rows.size), int(times_seen.sum())


def entry_codes(store: TableStore, places: Rows, inverse: Rows) -> Codes:
    """Code of each entry; that of the default row where it has no place.

    Args:
        store: of the table.
        places: ``[u]`` of distinct rows.
        inverse: ``[n]`` index of each entry's, -1 where it has none.
    """
    default = -1 if store.default_code is None else store.default_code
    # Index -1 is the last entry.
    return np.append(store.code_at[places], default).take(inverse, mode="wrap")
