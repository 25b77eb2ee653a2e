# SPDX-License-Identifier: Apache-2.0
"""Training with a `RowStore`: batches in passes, and what their rows cost."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from jaxsparse.agreement import raise_together
from jaxsparse.data.batch import Batch
from jaxsparse.packed_batch import PackedBatch
from jaxsparse.processes import maximum
from jaxsparse.state import EmbeddingState
from jaxsparse.store import RowStore
from jaxsparse.store.known_rows import rates
from jaxsparse.store.tier_clock import TIERS
from jaxsparse.train.state import TrainState

SUMS = ("batches", "new_keys", "evicted_keys", "host_to_device_bytes", "device_to_host_bytes")
"""Facts of passes that are added up in a row of the history."""

WAITS = ("plan", "data", "row", *TIERS)
"""What was waited for; ``data`` is a part of ``plan``, the last three are parts of ``row``."""

ROWS = ("device_rows", "host_rows", "ssd_rows")

Item = tuple[Batch, PackedBatch]

Enter = Callable[[Callable[[EmbeddingState], EmbeddingState], dict[str, Any]], None]


class StoredBatches:
    """The batches of a pass over the data, each once its rows are on the devices.

    They are taken in parts. Keys of a batch behind a part are not looked at before it is trained:
    there store and state are of one step, and the run can be saved or end.
    """

    def __init__(
        self,
        store: RowStore,
        batches: Iterator[Batch],
        until: Callable[[], int | None],
        enter: Enter,
        stops: Callable[[], bool],
        batches_per_pass: int | None,
    ) -> None:
        """Takes nothing yet.

        In several processes every call is a collective; ``until`` has to answer alike in all.

        Args:
            store: of the rows.
            batches: as they are to be trained.
            until: asked where a part begins: how many batches it has at most, None for all.
            enter: called between passes of the store, with what is to happen to the tables, and
                the facts of the pass.
            stops: asked at every batch, whether the run is to end as soon as it can: with the
                passes that are planned.
            batches_per_pass: as in `RowStore.passes`.
        """
        self._store, self._batches = store, batches
        self._until, self._enter, self._stops = until, enter, stops
        self._most = batches_per_pass
        self._part: Generator[Item, None, None] | None = None
        self._left: int | None = None
        self._drawn: list[Batch] = []
        self._num_drawn = self._num_taken = 0
        self._held: list[Item] = []
        self.is_stopped = False
        """Whether it ended because the run is to."""

    def take(self) -> Item | None:
        """The next batch and what was shipped; None at the end."""
        item = self._held.pop() if self._held else self._next()
        self._num_taken += item is not None
        return item

    def has_more(self) -> bool:
        """Whether there is a next one. Behind a part that is seen without looking at its keys."""
        if self._held:
            return True
        if self._left == 0 or self.is_stopped:
            self.close()
        if self._part is None:
            return self._any(self._num_drawn > self._num_taken or self._peek())
        item = self._next()
        self._held += [] if item is None else [item]
        return item is not None

    def close(self) -> None:
        """Ends the part: nothing is under way in the store."""
        part, self._part = self._part, None
        if part is not None:
            part.close()

    def _next(self) -> Item | None:
        while not self.is_stopped:
            if self._part is None:
                if not self._any_left():
                    return None
                self._part = self._one_part()
            if self._stops():
                self._store.end_passes()
            item = next(self._part, None)
            if item is not None:
                return item
            self.close()
            self.is_stopped = self._any(self._stops())
        return None

    def _one_part(self) -> Generator[Item, None, None]:
        self._left = self._until()
        batches = itertools.islice(self._draw(), self._left)
        run = self._store.passes(batches, batches_per_pass=self._most)
        with contextlib.closing(run) as passes:  # type: ignore[type-var]
            for p in passes:
                self._enter(lambda tables, p=p: self._store.enter(tables, p), p.facts)  # type: ignore[misc]
                for item in p.with_batches():
                    if self._left is not None:
                        self._left -= 1
                    yield item

    def _draw(self) -> Iterator[Batch]:
        """On a thread of the store's."""
        while self._peek():
            self._num_drawn += 1
            yield self._drawn.pop()

    def _any(self, value: bool) -> bool:
        """Whether it is so in any process; a collective."""
        return bool(maximum(self._store.emb.mesh, [value])[0])

    def _any_left(self) -> bool:
        """Whether there is another batch; in several processes, one of any."""
        error, has_more = None, False
        try:
            has_more = self._peek()
        except Exception as failed:
            error = failed  # the other processes must hear of it
        raise_together(self._store.emb.mesh, error)
        return self._any(has_more)

    def _peek(self) -> bool:
        """Whether there is another batch of this process."""
        if not self._drawn:
            batch = next(self._batches, None)
            self._drawn += [] if batch is None else [batch]
        return bool(self._drawn)


def one_batch(
    store: RowStore, state: TrainState, batches: Iterator[Batch]
) -> tuple[TrainState, PackedBatch | None]:
    """The state with the rows of a batch on the devices, and the batch.

    Args:
        store: of the rows.
        state: donated.
        batches: one, or none.

    Returns:
        None for the batch where no process has one.
    """
    packed = None
    with contextlib.closing(store.passes(batches)) as passes:  # type: ignore[type-var]
        for p in passes:
            state = dataclasses.replace(state, embeddings=store.enter(state.embeddings, p))
            packed = next(iter(p))
    return state, packed


def summarise(passes: Sequence[dict[str, Any]], moved: dict[str, int]) -> dict[str, Any]:
    """Part of a row of the history.

    Args:
        passes: facts of those entered since the row before.
        moved: bytes by tier and direction since then.
    """
    if not passes:
        return {}
    sums = {name: sum(facts[name] for facts in passes) for name in SUMS}
    counted = [counts for facts in passes for counts in facts["tables"].values()]
    hits, lookups = (sum(counts[what] for counts in counted) for what in ("hits", "lookups"))
    return {
        "passes": len(passes),
        "batches_per_pass": sums.pop("batches") / len(passes),
        **sums,
        **moved,
        "hit_rate": hits / max(lookups, 1),
        **{f"{what}_wait_ms": 1e3 * sum(f[f"{what}_wait_s"] for f in passes) for what in WAITS},
        "garbage": passes[-1]["garbage"],
        "tables": {name: _of_table(passes, name) for name in passes[-1]["tables"]},
    }


def _of_table(passes: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Size, rows by tier, and rates over all the passes."""
    told = [facts["tables"][name] for facts in passes]
    last = told[-1]
    counts = {what: sum(one[what] for one in told) for what in last if what not in ROWS}
    rows = {what: last[what] for what in ("size", *ROWS)}
    return {**rows, **rates(counts)}
