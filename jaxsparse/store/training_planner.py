# SPDX-License-Identifier: Apache-2.0
"""Passes that are trained on: keys get rows, occurrences count, rows are given up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.store.errors import StoreFullError
from jaxsparse.store.known_rows import NO_ROW, Proposal
from jaxsparse.store.pass_plan import PassPlan
from jaxsparse.store.planner import Codes, Gathered, Keys, Looked, Planner, Rows, entry_codes
from jaxsparse.store.residency import Moves
from jaxsparse.store.table_store import TableStore
from jaxsparse.store.translate import Asked, numbers_to_draw


class TrainingPlanner(Planner):
    """What happens to keys depends on the order of batches, not on how they are grouped."""

    is_training = True

    def __init__(
        self,
        emb: EmbeddingCollection,
        tables: Mapping[str, TableStore],
        source: Iterator[Asked],
        batches_per_pass: int | None,
        step: int,
    ) -> None:
        """Goes on at batch ``step``."""
        super().__init__(emb, tables, source, batches_per_pass)
        self.step = step
        self.to_evict: dict[str, list[Keys]] = {name: [] for name in tables}
        """Keys that are to lose their rows before the next pass is planned."""

    def next(self) -> PassPlan | None:
        """As `Planner.next`; keys to evict go first."""
        for name, parts in self.to_evict.items():
            if parts:
                self.to_evict[name] = []
                self.evicted[name].append(give_up_keys(self._tables[name], np.concatenate(parts)))
        return super().next()

    def _take(self, looked: Looked, is_first: bool) -> bool:
        try:
            proposals = self._propose(looked, is_first)
        except StoreFullError:
            if is_first:
                raise
            return False  # batches before it are trained first
        if proposals is None:
            return False
        for name, batch in proposals.items():
            store, gathered = self._tables[name], self._gathered[name]
            before = gathered.hits
            # Keys that were not admitted read the default row, which is always there.
            gathered.hits += int(batch.new_counts[~batch.admitted].sum())
            gathered.count(batch.distinct, batch.counts, batch.num_lookups)
            store.known.totals["hits"] += gathered.hits - before
            distinct, inverse = store.known.commit(batch, self.step, looked.asked.time)
            store.owners.note(distinct[batch.distinct.size :], batch.new_keys[batch.admitted])
            store.residency.forget(batch.evicted)
            self.evicted[name].append(batch.evicted)
            gathered.add(distinct, inverse)
        self.step += 1
        return True

    def _propose(self, looked: Looked, is_first: bool) -> dict[str, Proposal] | None:
        """What the batch would do to each table; None where it has to wait for the next pass."""
        proposals: dict[str, Proposal] = {}
        asked, step = looked.asked, self.step
        for name, store in self._tables.items():
            keys, rows = asked.keys[name], self._rows(looked, name)
            seen = None if asked.times_seen is None else asked.times_seen[name]
            batch = store.known.propose(keys, rows, step, asked.time, seen)
            new = store.owners.counts_of_keys(batch.new_keys[batch.admitted])
            store.residency.check(store.owners.counts(batch.distinct) + new)
            gathered = self._gathered[name]
            need = gathered.sizes + gathered.fresh(batch.distinct) + new
            if not is_first and (
                (need > self._limits(name)).any()
                # A row that an earlier batch of the pass trains is given up after the pass.
                or gathered.marked(batch.evicted).any()
            ):
                return None
            proposals[name] = batch
        return proposals

    def _place(self, gathered: Gathered) -> tuple[Moves, list[Codes]]:
        store = gathered.store
        needed = gathered.needed()
        is_made = store.residency.is_made(needed)
        new = needed[~is_made]
        numbers = numbers_to_draw(store.spec, store.known.index.keys_of(new))
        owners = store.owners.of(needed[is_made]), store.owners.of(new)
        next_rows = self.next_rows[store.spec.name]
        hotness = store.known.hotness
        moves = store.residency.plan(
            needed[is_made], new, numbers, next_rows, hotness, owners=owners
        )
        return moves, [
            entry_codes(store, store.residency.places_after(distinct, moves), inverse)
            for distinct, inverse in gathered.batches
        ]


def give_up_keys(store: TableStore, keys: Keys) -> Rows:
    """Takes their rows from keys ``[n]``; those without one do not matter.

    Returns:
        The rows, which may be on the host still.
    """
    found = np.unique(store.known.index.find(keys))
    rows: Rows = found[found != NO_ROW]
    give_up_rows(store, rows)
    return rows


def give_up_rows(store: TableStore, rows: Rows) -> None:
    """Distinct rows lose their keys and their places on the devices."""
    store.known.give_up(rows)
    store.residency.forget(rows)
