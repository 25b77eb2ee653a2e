# SPDX-License-Identifier: Apache-2.0
"""A position in a dataset that is read again and again: epoch, and batch in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from jaxsparse.data.batch import Batch

State = dict[str, int | bool | str]


class EpochDataset(ABC):
    """Every ``iter()`` is the next epoch, or what is left of a restored one.

    The batches of an epoch depend on the epoch and on `_identity` alone, so a position is two
    numbers, and a run taken up again sees the rows it had not seen.
    """

    def __init__(self, batch_size: int, *, shuffle: bool, seed: int, drop_last: bool) -> None:
        """Starts before the first batch of epoch 0."""
        self._batch_size, self._shuffle = batch_size, shuffle
        self._seed, self._drop_last = seed, drop_last
        self._epoch = 0  # of the next batch, which is batch number _offset of it
        self._offset = 0
        self._restored = False

    @property
    def batch_size(self) -> int:
        """Rows in a batch of the whole job; the last one may have fewer."""
        return self._batch_size

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows in all."""

    @abstractmethod
    def _identity(self) -> State:
        """What the batches depend on, besides the epoch; plain json."""

    @abstractmethod
    def _batches(self, epoch: int, offset: int) -> Iterator[Batch]:
        """The batches from number ``offset`` on; calls `_passed` before each yield."""

    def __len__(self) -> int:
        """Batches in an epoch, the same in every process."""
        full, rest = divmod(self.num_rows, self._batch_size)
        return full + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the next epoch, or after `restore` those left of the restored one."""
        if self._offset and not self._restored:
            self._epoch, self._offset = self._epoch + 1, 0
        self._restored = False
        return self._batches(self._epoch, self._offset)

    def state(self) -> State:
        """Position after the last batch that was yielded, and what it depends on; plain json."""
        return {"epoch": self._epoch, "offset": self._offset, **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Lets the next ``iter()`` go on from a `state`, of this process or another.

        Raises:
            ValueError: the state is of other rows, another batch size or another order.
        """
        missing = sorted({"epoch", "offset", *self._identity()} - set(state))
        if missing:
            raise ValueError(f"the state of the dataset lacks {missing}")
        for name, here in self._identity().items():
            if state[name] != here:
                raise ValueError(
                    f"the state was saved with {name}={state[name]}, but this dataset has "
                    f"{name}={here}; the batches would differ"
                )
        epoch, offset = int(state["epoch"]), int(state["offset"])
        # A stream may have no rows: all of its files' were skipped, or it has none to begin with.
        if epoch < 0 or not 0 <= offset < max(len(self), 1):
            raise ValueError(
                f"epoch must be >= 0 and offset in 0..{len(self) - 1}, got {epoch} and {offset}"
            )
        self._epoch, self._offset, self._restored = epoch, offset, True

    def _passed(self, epoch: int, number: int) -> None:
        """Counts a batch as seen. Before its yield: whoever holds it finds it counted."""
        last = number + 1 == len(self)
        self._epoch, self._offset = (epoch + 1, 0) if last else (epoch, number + 1)
