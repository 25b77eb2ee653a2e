# SPDX-License-Identifier: Apache-2.0
"""One pass over a dataset, and where it stands after every batch that was trained."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, TypeVar

from jaxsparse.data.batch import Batch
from jaxsparse.data.prefetch import Prefetcher
from jaxsparse.train.batches import Dataset

T = TypeVar("T")

START: dict[str, Any] = {"state": None, "taken": 0, "ended": False}
"""Position before the first batch of a dataset."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A batch on its way to a step, and what it takes to go on behind it."""

    batch: Batch | None
    """None at the end of the pass."""
    item: Any
    """What was made of it."""
    position: dict[str, Any]
    skipped: int
    """Batches left out since the one before."""
    dropped: int
    """Samples left out since."""


class Feed:
    """Draws batches and remembers, for those that are trained later, the position behind each.

    Batches are drawn, and made ready for a step, ahead of their turn on a thread; a dataset's own
    ``state()`` is then ahead of what was trained, until `close` sets it back.
    """

    def __init__(
        self,
        dataset: Dataset,
        admit: Callable[[Batch], Batch | None],
        ready: Callable[[Batch], Any],
        position: dict[str, Any] = START,
        *,
        prefetch: int,
        needed: int | None,
        lock: contextlib.AbstractContextManager[Any],
    ) -> None:
        """Starts nothing yet.

        Args:
            dataset: set to ``position``, if it knows its position.
            admit: what is left of a batch; None where it is left out.
            ready: what may be done ahead to a batch that is admitted.
            position: in the pass that is taken up.
            prefetch: batches made ahead on a thread; 0 makes each when it is asked for.
            needed: batches that the run still needs, if known: so many are drawn ahead and no more,
                so that a dataset without a position loses none.
            lock: held while a batch is drawn, so that others may use the dataset in between.
        """
        self._dataset, self._admit, self._ready = dataset, admit, ready
        self._behind = position  # the last trained batch
        self._lock = lock
        self._drawn: deque[Drawn] = deque()
        self._draws = self._draw(position)
        self._ahead: Prefetcher[Drawn] | None = None
        if prefetch:
            self._ahead = Prefetcher(itertools.islice(self._draws, needed), depth=prefetch)

    def __iter__(self) -> Iterator[Any]:
        """What was made of the batches that are to be trained."""
        ahead = () if self._ahead is None else self._ahead
        for drawn in itertools.chain(ahead, self._draws):
            self._drawn.append(drawn)
            if drawn.batch is not None:
                yield drawn.item

    def trained(self, batch: Batch | None) -> list[Drawn]:
        """What was drawn up to a batch whose turn has come, that batch last.

        Args:
            batch: as it was admitted; None, or one that was not, when there are no more.
        """
        # A copy: a row store draws on a thread of its own.
        known = any(drawn.batch is batch for drawn in list(self._drawn))
        found = []
        while self._drawn:
            found.append(self._drawn.popleft())
            self._behind = found[-1].position
            if known and found[-1].batch is batch:
                break
        return found

    def close(self) -> None:
        """Ends the thread, and sets a dataset that was drawn ahead back to what was trained."""
        if self._ahead is not None:
            self._ahead.close()
        self._draws.close()
        set_back(self._dataset, self._behind["state"])

    def _draw(self, position: dict[str, Any]) -> Generator[Drawn, None, None]:
        skipped = dropped = 0
        batches = self._rest(position)
        while True:
            with self._lock:
                batch = next(batches, None)
                state = _state_of(self._dataset)
            if batch is None:
                break
            position = {"state": state, "taken": position["taken"] + 1, "ended": False}
            admitted = self._admit(batch)
            if admitted is None:
                skipped += 1
                continue
            dropped += batch.num_samples - admitted.num_samples
            yield Drawn(admitted, self._ready(admitted), position, skipped, dropped)
            skipped = dropped = 0
        # A dataset may only now turn to its next pass.
        position = {**position, "ended": True}
        if position["state"] is not None:
            position["state"] = state
        yield Drawn(None, None, position, skipped, dropped)

    def _rest(self, position: dict[str, Any]) -> Iterator[Batch]:
        if position["ended"]:
            return  # other processes go on with the pass
        to_skip = position["taken"] if position["state"] is None else 0
        for number, batch in enumerate(self._dataset):
            if number >= to_skip:
                yield batch


class Ahead(Generic[T]):
    """An iterator that can be asked whether it has more.

    >>> numbers = Ahead(iter([1, 2]))
    >>> numbers.take(), numbers.has_more(), numbers.take(), numbers.has_more(), numbers.take()
    (1, True, 2, False, None)
    """

    def __init__(self, items: Iterator[T]) -> None:
        """Takes nothing yet."""
        self._items = items
        self._next: deque[T | None] = deque()
        self._error: Exception | None = None

    def take(self) -> T | None:
        """The next item; None at the end.

        Raises:
            Exception: what the iterator raised, though it was asked for more before.
        """
        if self._error is not None:
            raise self._error
        return self._next.popleft() if self._next else next(self._items, None)

    def has_more(self) -> bool:
        """Whether there is a next item, which is made to see that. An error counts as one."""
        if not self._next and self._error is None:
            try:
                self._next.append(next(self._items, None))
            except Exception as error:
                self._error = error
        return self._error is not None or self._next[0] is not None


def knows_position(dataset: Any) -> bool:
    """Whether a dataset has ``state()`` and ``restore(state)``."""
    return hasattr(dataset, "state") and hasattr(dataset, "restore")


def _state_of(dataset: Any) -> Any:
    if not knows_position(dataset):
        return None
    try:
        return dataset.state()
    except (TypeError, AttributeError):  # it wraps one that does not know
        return None


@contextlib.contextmanager
def undisturbed(dataset: Any) -> Iterator[None]:
    """A dataset that is iterated over inside goes on afterwards as if it had not been."""
    before = _state_of(dataset)
    try:
        yield
    finally:
        set_back(dataset, before)


def set_back(dataset: Any, state: Any) -> None:
    """Brings a dataset that knows its position to a state, None for none, if it is not there."""
    if state is None or _state_of(dataset) == state:
        return
    dataset.restore(state)
    if not isinstance(dataset, Prefetcher):
        # As behind any loop that was left, the next `iter()` is the next pass, not the rest of
        # this one: whoever predicts on the same dataset wants all of it.
        iter(dataset)


def check_prefetch(prefetch: object) -> None:
    """Raises ValueError unless it is a number of batches."""
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise ValueError(f"prefetch must be an int >= 0, got {prefetch!r}")
