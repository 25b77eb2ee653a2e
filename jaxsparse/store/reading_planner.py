# SPDX-License-Identifier: Apache-2.0
"""Passes that only read: no key gets a row to keep, nothing is counted."""

from __future__ import annotations

import numpy as np

from jaxsparse.store.known_rows import NO_ROW
from jaxsparse.store.planner import Codes, Gathered, Looked, Planner
from jaxsparse.store.residency import Moves
from jaxsparse.store.translate import numbers_to_draw


class ReadingPlanner(Planner):
    """A key without a row reads the default row, or one drawn for the pass and forgotten."""

    is_training = False

    def _take(self, looked: Looked, is_first: bool) -> bool:
        found = {}
        for name, store in self._tables.items():
            gathered = self._gathered[name]
            keys, rows = looked.keyed.keys[name], self._rows(looked, name)
            distinct, counts = np.unique(rows, return_counts=True)
            has_row = distinct != NO_ROW
            has_row[has_row] = store.residency.is_made(distinct[has_row])
            if not has_row.all():
                rows = np.where(np.isin(rows, distinct[~has_row]), np.int32(NO_ROW), rows)
            distinct, counts = distinct[has_row], counts[has_row]
            unknown_keys = keys[rows == NO_ROW]
            own, unknown = gathered.unknown[:0], gathered.unknown
            if store.default_code is None:
                own = np.unique(unknown_keys)
                unknown = np.union1d(unknown, own)
            store.residency.check(distinct.size + own.size)
            fresh = distinct.size - int(gathered.marked(distinct).sum())
            need = gathered.size + fresh + unknown.size
            if not is_first and need > self._limit(name):
                return False
            found[name] = rows, distinct, counts, unknown, unknown_keys
        for name, (rows, distinct, counts, unknown, unknown_keys) in found.items():
            gathered = self._gathered[name]
            gathered.count(distinct, counts, rows.size)
            gathered.add(distinct, rows)
            gathered.unknown = unknown
            gathered.unknown_keys.append(unknown_keys)
        return True

    def _place(self, gathered: Gathered) -> tuple[Moves, list[Codes]]:
        store = gathered.store
        unknown = gathered.unknown
        moves = store.residency.plan(
            gathered.needed(),
            np.full(unknown.size, NO_ROW, np.int32),
            numbers_to_draw(store.spec, unknown),
            self._is_next(store.spec.name, len(gathered.batches)),
            store.known.hotness,
            is_lent=True,
        )
        codes = []
        for rows, keys in zip(gathered.batches, gathered.unknown_keys, strict=True):
            has_row = rows != NO_ROW
            code = np.full(rows.size, -1, np.int64)
            code[has_row] = store.code_at[store.residency.places_after(rows[has_row], moves)]
            if store.default_code is None:
                code[~has_row] = store.code_at[moves.new_places[np.searchsorted(unknown, keys)]]
            else:
                code[~has_row] = store.default_code
            codes.append(code)
        return moves, codes
