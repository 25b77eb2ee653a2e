# SPDX-License-Identifier: Apache-2.0
"""Passes that only read: no key gets a row to keep, nothing is counted."""

from __future__ import annotations

import numpy as np

from jaxsparse.store.index import distinct_rows
from jaxsparse.store.known_rows import NO_ROW
from jaxsparse.store.planner import Codes, Gathered, Looked, Planner, entry_codes, occurrences
from jaxsparse.store.residency import Moves
from jaxsparse.store.translate import numbers_to_draw


class ReadingPlanner(Planner):
    """A key without a row reads the default row, or one drawn for the pass and forgotten."""

    is_training = False

    def _take(self, looked: Looked, is_first: bool) -> bool:
        results = {}
        for name, store in self._tables.items():
            gathered = self._gathered[name]
            keys, rows = looked.asked.keys[name], self._rows(looked, name)
            found = distinct_rows(rows, store.known.marks)
            is_made = store.residency.is_made(found.rows)
            if not is_made.all():
                rows = np.where(np.isin(rows, found.rows[~is_made]), np.int32(NO_ROW), rows)
                found = distinct_rows(rows, store.known.marks)
            distinct = found.rows
            unknown_keys = keys[rows == NO_ROW]
            own, unknown = gathered.unknown[:0], gathered.unknown
            if store.default_code is None:
                own = np.unique(unknown_keys)
                unknown = np.union1d(unknown, own)
            owners = store.owners
            store.residency.check(owners.counts(distinct) + owners.counts_of_keys(own))
            new = owners.counts_of_keys(unknown)
            need = gathered.sizes + gathered.fresh(distinct) + new
            if not is_first and (need > self._limits(name)).any():
                return False
            results[name] = found, unknown, unknown_keys
        for name, (found, unknown, unknown_keys) in results.items():
            gathered = self._gathered[name]
            seen = looked.asked.times_seen
            told = occurrences(found, None if seen is None else seen[name])
            gathered.count(found.rows, *told)
            gathered.add(found.rows, found.inverse)
            gathered.unknown = unknown
            gathered.unknown_keys.append(unknown_keys)
        return True

    def _place(self, gathered: Gathered) -> tuple[Moves, list[Codes]]:
        store = gathered.store
        unknown = gathered.unknown
        needed = gathered.needed()
        moves = store.residency.plan(
            needed,
            np.full(unknown.size, NO_ROW, np.int32),
            numbers_to_draw(store.spec, unknown),
            self.next_rows[store.spec.name],
            store.known.hotness,
            is_lent=True,
            owners=(store.owners.of(needed), store.owners.of_keys(unknown)),
        )
        codes = []
        lent = store.code_at[moves.new_places]
        for (distinct, inverse), keys in zip(gathered.batches, gathered.unknown_keys, strict=True):
            places = store.residency.places_after(distinct, moves)
            code = entry_codes(store, places, inverse)
            if store.default_code is None:
                code[inverse == NO_ROW] = lent[np.searchsorted(unknown, keys)]
            codes.append(code)
        return moves, codes
