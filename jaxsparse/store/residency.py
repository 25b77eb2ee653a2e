# SPDX-License-Identifier: Apache-2.0
"""Which rows of one table are on the devices, and at which of its places."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from jaxsparse.store.errors import StoreFullError
from jaxsparse.store.free_places import FreePlaces
from jaxsparse.store.growing import grown
from jaxsparse.store.hotness import Hotness, coldest

Rows = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint64]

NOWHERE = -1
"""Place of a row that is not on the devices."""

EMPTY = -1
"""Row of a place that holds none."""


@dataclasses.dataclass
class Moves:
    """What a pass changes on the devices of one table; places are filled as they become free."""

    out_rows: Rows
    """Rows that leave, for those of the pass."""
    out_places: Rows
    in_rows: Rows
    """Rows that come from the host."""
    in_places: Rows
    new_rows: Rows
    """Rows that are made; none where the pass only reads."""
    new_places: Rows
    new_numbers: Keys
    """What they are drawn from: 64 bits each."""
    is_lent: bool
    """Whether ``new_places`` hold rows that nobody keeps: keys an evaluation has met."""


class Residency:
    """Places of one table. What `plan` decides is so once `commit` is called."""

    def __init__(self, table: str, num_places: int, group_at: Rows | None = None) -> None:
        """Starts with all places free.

        Args:
            table: its name.
            num_places: on the devices.
            group_at: ``[num_places]`` owner of each place (`RowOwners`), whose rows alone may lie
                there; None where there is one.
        """
        self.table, self.num_places = table, num_places
        self.place = np.zeros(0, np.int32)
        self.row_at = np.full(num_places, EMPTY, np.int32)
        self._group_at = group_at
        self._free = [FreePlaces(places) for places in self._by_group()]
        self.group_places = np.array([len(free) for free in self._free])
        """Places of each owner."""
        self._lent = np.zeros(0, np.int32)
        self._is_made = np.zeros(0, bool)

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        free = sum(free.nbytes for free in self._free)
        return free + sum(a.nbytes for a in (self.place, self.row_at, self._is_made))

    @property
    def num_resident(self) -> int:
        """Rows on the devices."""
        return int(np.count_nonzero(self.row_at != EMPTY))

    def grow(self, num_rows: int) -> None:
        """Makes room for rows below ``num_rows``."""
        self.place = grown(self.place, num_rows, NOWHERE)

    def places(self, rows: Rows) -> Rows:
        """Places ``[n]`` of rows, NOWHERE for those that are not on the devices."""
        self.grow(int(rows.max(initial=-1)) + 1)
        places: Rows = self.place[rows]
        return places

    def is_made(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` have values somewhere; others are still to be drawn."""
        self._is_made = grown(self._is_made, int(rows.max(initial=-1)) + 1, False)
        return self._is_made[rows]

    def set_made(self, rows: Rows) -> None:
        """Rows have values now."""
        self._is_made = grown(self._is_made, int(rows.max(initial=-1)) + 1, False)
        self._is_made[rows] = True

    def tidy(self) -> None:
        """Free places are taken in order again: as in a store that was restored."""
        self._take_back_lent()
        for free in self._free:
            free.tidy()

    def take_in(self, rows: Rows, places: Rows) -> None:
        """Starts with rows that have values, at ``places`` or NOWHERE ``[n]``."""
        self.set_made(rows)
        here = places != NOWHERE
        self._settle(rows[here], places[here])
        self._free = [
            FreePlaces(places, self.row_at[places] == EMPTY) for places in self._by_group()
        ]

    def forget(self, rows: Rows) -> None:
        """Rows were given up: their places are free at once, what lies there is nobody's."""
        places = self.places(rows)
        places = places[places != NOWHERE]
        self.place[rows] = NOWHERE
        self._is_made[rows[rows < self._is_made.size]] = False
        self.row_at[places] = EMPTY
        self._give_back(places)

    def plan(
        self,
        needed: Rows,
        new: Rows,
        new_numbers: Keys,
        next_rows: Rows,
        hotness: Hotness,
        *,
        is_lent: bool = False,
        owners: tuple[Rows, Rows] | None = None,
    ) -> Moves:
        """Finds places for the rows of a pass.

        Args:
            needed: distinct rows of the pass that are on the devices or on the host.
            new: rows that have to be made; for an evaluation placeholders, one a key.
            new_numbers: what they are drawn from.
            next_rows: distinct rows that the pass after this one reads.
            hotness: of the rows.
            is_lent: whether the new ones go after the pass.
            owners: of ``needed`` and of ``new`` (`RowOwners`); not read where there is one. There
                have to be as many places for each (`check`).
        """
        self._take_back_lent()
        places = self.places(needed)
        coming = needed[places == NOWHERE]
        if self._group_at is None:
            out, filled = self._make_room(0, coming.size + new.size, places, next_rows, hotness)
        else:
            assert owners is not None, "of places of several owners"
            wanted = np.concatenate([owners[0][places == NOWHERE], owners[1]])
            filled = np.empty(wanted.size, np.int32)
            parts = []
            for group in range(len(self._free)):
                its = np.flatnonzero(wanted == group)
                leaving, filled[its] = self._make_room(group, its.size, places, next_rows, hotness)
                parts.append(leaving)
            out = np.concatenate(parts)
        split = coming.size
        return Moves(
            out, self.place[out], coming, filled[:split], new, filled[split:], new_numbers, is_lent
        )

    def _make_room(
        self,
        group: int,
        count: int,
        needed: Rows,
        next_rows: Rows,
        hotness: Hotness,
    ) -> tuple[Rows, Rows]:
        """Rows of an owner that leave, and ``count`` of its places; ``needed`` as in `_victims`."""
        num_out = max(0, count - len(self._free[group]))
        out = self._victims(group, needed, num_out, next_rows, hotness)
        taken = self._free[group].take(count - num_out)
        return out, np.concatenate([taken, self.place[out]])

    def check(self, need: npt.NDArray[np.int64]) -> None:
        """Raises StoreFullError where one batch needs more places of an owner than it has."""
        short = np.flatnonzero(need > self.group_places)
        if short.size:
            where = "the devices"
            if need.size > 1:
                where += f" of the process that owns them, number {short[0]} of {need.size}"
            raise StoreFullError(
                f"table {self.table!r}: one batch needs {need[short[0]]:,} rows on {where}, "
                f"the table has {self.group_places[short[0]]:,}; raise Tiers(device_rows=) or "
                "Dynamic(capacity=), or use smaller batches"
            )

    def commit(self, moves: Moves) -> None:
        """Rows are where a plan wants them from here on."""
        self.place[moves.out_rows] = NOWHERE
        self.row_at[moves.out_places] = EMPTY
        self._settle(moves.in_rows, moves.in_places)
        if moves.is_lent:
            self._lent = moves.new_places
        else:
            self._settle(moves.new_rows, moves.new_places)
            self.set_made(moves.new_rows)

    def cancel(self, moves: Moves) -> None:
        """A plan is not carried out: rows stay where they are."""
        filled = np.concatenate([moves.in_places, moves.new_places])
        self._give_back(np.setdiff1d(filled, moves.out_places))

    def places_after(self, rows: Rows, moves: Moves) -> Rows:
        """Places ``[n]`` of rows once a plan is carried out."""
        for part in (rows, moves.in_rows, moves.new_rows):
            self.grow(int(part.max(initial=-1)) + 1)
        self.place[moves.in_rows] = moves.in_places
        if not moves.is_lent:
            self.place[moves.new_rows] = moves.new_places
        after = self.place[rows]
        self.place[moves.in_rows] = NOWHERE
        if not moves.is_lent:
            self.place[moves.new_rows] = NOWHERE
        return after

    def _settle(self, rows: Rows, places: Rows) -> None:
        self.grow(int(rows.max(initial=-1)) + 1)
        self.place[rows] = places
        self.row_at[places] = rows

    def _victims(
        self, group: int, needed: Rows, count: int, next_rows: Rows, hotness: Hotness
    ) -> Rows:
        """An owner's coldest rows that the pass does not need; those of the next one only where it
        must be.

        ``needed`` are places of the rows it needs, or NOWHERE.
        """
        if count == 0:
            return self.row_at[:0]
        # By place: there are far fewer of them than rows.
        may_go = self.row_at != EMPTY
        if self._group_at is not None:
            may_go &= self._group_at == group
        may_go[needed[needed != NOWHERE]] = False
        should_go = may_go.copy()
        should_stay = self.places(next_rows)
        should_go[should_stay[should_stay != NOWHERE]] = False
        chosen = np.flatnonzero(should_go)
        if chosen.size >= count:
            chosen = chosen[coldest(hotness.of(self.row_at[chosen]), count)]
        else:
            forced = np.flatnonzero(may_go & ~should_go)
            scores = hotness.of(self.row_at[forced])
            chosen = np.concatenate([chosen, forced[coldest(scores, count - chosen.size)]])
        return self.row_at[chosen]

    def _take_back_lent(self) -> None:
        self._give_back(self._lent)
        self._lent = self._lent[:0]

    def _give_back(self, places: Rows) -> None:
        if self._group_at is None:
            self._free[0].give_back(places)
            return
        for group, free in enumerate(self._free):
            free.give_back(places[self._group_at[places] == group])

    def _by_group(self) -> list[npt.NDArray[np.int64]]:
        """Places of each owner, ascending."""
        if self._group_at is None:
            return [np.arange(self.num_places)]
        groups = range(int(self._group_at.max()) + 1)
        return [np.flatnonzero(self._group_at == group) for group in groups]
