# SPDX-License-Identifier: Apache-2.0
"""One process's part of a dataset that every process has whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxsparse.data.batch import Batch


class BatchShare:
    """A contiguous part of every batch of a dataset; the parts of all processes are the batch.

    Batches, their order and their number are those of the whole job. The last batch may leave a
    process without samples: it is yielded all the same.

    >>> import numpy as np
    >>> whole = [Batch({"id": np.arange(3)}, labels=np.zeros(3))]
    >>> [next(iter(BatchShare(whole, index, 2))).features["id"].tolist() for index in (0, 1)]
    [[0], [1, 2]]
    """

    def __init__(self, dataset: Any, index: int, count: int) -> None:
        """Takes part ``index`` of ``count``.

        Args:
            dataset: the same in every process, its order too.
            index: which process this is.
            count: how many there are.
        """
        if not 0 <= index < count:
            raise ValueError(f"BatchShare: index must be in 0..{count - 1}, got {index}")
        self._dataset, self._index, self._count = dataset, index, count

    @property
    def batch_size(self) -> int:
        """Of the whole job."""
        return int(self._dataset.batch_size)

    @property
    def num_rows(self) -> int:
        """Of the whole job."""
        return int(self._dataset.num_rows)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._dataset)

    def __iter__(self) -> Iterator[Batch]:
        """One epoch's parts."""
        for batch in self._dataset:
            size = batch.num_samples
            start, stop = (size * k // self._count for k in (self._index, self._index + 1))
            yield batch.slice(start, stop)

    def state(self) -> Any:
        """The whole dataset's, the same in every process."""
        return self._dataset.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state`, saved by any number of processes."""
        self._dataset.restore(state)
