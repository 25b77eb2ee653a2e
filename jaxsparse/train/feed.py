# SPDX-License-Identifier: Apache-2.0
"""One pass over a dataset, and where it stands after every batch that was trained."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from jaxsparse.data.batch import Batch
from jaxsparse.train.batches import Dataset

T = TypeVar("T")

START: dict[str, Any] = {"state": None, "taken": 0, "ended": False}
"""Position before the first batch of a dataset."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A batch on its way to a step, and what it takes to go on behind it."""

    batch: Batch | None
    """None at the end of the pass."""
    position: dict[str, Any]
    skipped: int
    """Batches left out since the one before."""
    dropped: int
    """Samples left out since."""


class Feed:
    """Draws batches and remembers, for those that are trained later, the position behind each.

    Packing and looking ahead draw batches before their turn; a dataset's own ``state()`` is then
    ahead of what was trained.
    """

    def __init__(
        self,
        dataset: Dataset,
        admit: Callable[[Batch], Batch | None],
        position: dict[str, Any] = START,
    ) -> None:
        """Starts nothing yet.

        Args:
            dataset: set to ``position``, if it knows its position.
            admit: what is left of a batch; None where it is left out.
            position: in the pass that is taken up.
        """
        self._dataset, self._admit = dataset, admit
        self._from = position
        self._drawn: deque[Drawn] = deque()

    def __iter__(self) -> Iterator[Batch]:
        """The batches that are to be trained."""
        position = self._from
        skipped = dropped = 0
        for batch in self._rest():
            position = {
                "state": _state_of(self._dataset),
                "taken": position["taken"] + 1,
                "ended": False,
            }
            admitted = self._admit(batch)
            if admitted is None:
                skipped += 1
                continue
            dropped += batch.num_samples - admitted.num_samples
            self._drawn.append(Drawn(admitted, position, skipped, dropped))
            skipped = dropped = 0
            yield admitted
        self._drawn.append(Drawn(None, {**position, "ended": True}, skipped, dropped))

    def trained(self, batch: Batch | None) -> list[Drawn]:
        """What was drawn up to a batch whose turn has come, that batch last.

        Args:
            batch: as it was yielded; None, or one that was not, when there are no more.
        """
        known = any(drawn.batch is batch for drawn in self._drawn)
        found = []
        while self._drawn:
            found.append(self._drawn.popleft())
            if known and found[-1].batch is batch:
                break
        return found

    def _rest(self) -> Iterator[Batch]:
        if self._from["ended"]:
            return  # other processes go on with the pass
        to_skip = self._from["taken"] if self._from["state"] is None else 0
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
