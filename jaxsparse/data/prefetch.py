# SPDX-License-Identifier: Apache-2.0
"""Decoding and packing on a thread of their own, a bounded number of batches ahead."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")

DEPTH = 4
"""Default number of batches held ready."""


class Prefetcher(Generic[T]):
    """What ``transform`` makes of a dataset's batches, in order, made ahead on a thread.

    Each item travels with the dataset's position behind it: `state` is that of the last item
    *delivered*, so a run saved and taken up again misses nothing that was only prefetched.
    An error of the dataset or of ``transform`` is raised where its item would have come.

    A loop that is left early stops the thread and sets the dataset back to where the loop was:
    the next ``iter()`` goes on there. Two of them can be chained, to decode on one thread and to
    pack on another.

    >>> numbers = Prefetcher([1, 2, 3], lambda number: number * 10)
    >>> list(numbers)
    [10, 20, 30]
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        transform: Callable[[Any], T] | None = None,
        *,
        depth: int = DEPTH,
    ) -> None:
        """Starts nothing yet.

        Args:
            dataset: yields batches whenever it is iterated; may have ``state`` and ``restore``.
            transform: called on the thread for each batch, in order; None leaves them as they are.
            depth: items made ahead, besides the one being made.
        """
        if depth < 1:
            raise ValueError(f"depth must be >= 1, got {depth}")
        self._dataset: Any = dataset
        self._transform = transform
        self._depth = depth
        self._resumable = hasattr(dataset, "state") and hasattr(dataset, "restore")
        self._worker: _Worker | None = None
        self._state: Any = None

    @property
    def batch_size(self) -> int:
        """The dataset's."""
        return int(self._dataset.batch_size)

    def __len__(self) -> int:
        """Batches in an epoch of the dataset."""
        return len(self._dataset)

    def __iter__(self) -> Iterator[T]:
        """The next epoch's items; the thread starts at once.

        Raises:
            RuntimeError: from a loop that was under way, when it asks for its next item.
        """
        if self._worker is not None:
            self._worker.is_superseded = True
        self.close()
        batches = iter(self._dataset)
        self._state = self._position()
        worker = _Worker(batches, self._make, self._depth)
        self._worker = worker
        return self._deliver(worker)

    def state(self) -> Any:
        """The dataset's state after the last item that was delivered.

        Raises:
            TypeError: the dataset has no state.
        """
        if not self._resumable:
            raise TypeError(f"{type(self._dataset).__name__} has no state() and restore()")
        return self._position() if self._worker is None else self._state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Lets the next ``iter()`` go on from a `state`; ends the present one."""
        self.close()
        self._dataset.restore(state)

    def close(self) -> None:
        """Stops the thread, if it runs, and sets the dataset back to the last delivered item."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
            if self._resumable and not worker.is_exhausted:
                self._dataset.restore(self._state)

    def _position(self) -> Any:
        return self._dataset.state() if self._resumable else None

    def _make(self, batch: Any) -> tuple[Any, Any]:
        state = self._position()
        return (batch if self._transform is None else self._transform(batch)), state

    def _deliver(self, worker: _Worker) -> Iterator[T]:
        try:
            for item, self._state in worker:
                yield item
        finally:
            if self._worker is worker:
                self.close()


EXIT_S = 10.0
"""How long the end of Python waits for a thread: its dataset may wait for ever."""

_RUNNING: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends the threads of loops that an error left: inside C++ they would abort the process."""
    for worker in list(_RUNNING):
        worker.close(EXIT_S)


class _Worker:
    """A thread that fills a bounded queue from an iterator."""

    def __init__(self, source: Iterator[Any], make: Callable[[Any], Any], depth: int) -> None:
        self._source, self._make, self._depth = source, make, depth
        self._ready: deque[Any] = deque()
        self._change = threading.Condition()
        self._ended = self._stopping = self.is_superseded = False
        self._error: BaseException | None = None
        # A daemon, ended by `_close_all`: Python waits for other threads before it calls that.
        self._thread = threading.Thread(target=self._run, name="jaxsparse-prefetch", daemon=True)
        _RUNNING.add(self)
        self._thread.start()

    @property
    def is_exhausted(self) -> bool:
        """Whether every item was taken, and the source ended well."""
        return self._ended and self._error is None and not self._ready and not self._stopping

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._ready or self._ended or self._stopping)
                if self._ready and not self._stopping:
                    item = self._ready.popleft()
                    self._change.notify_all()
                elif self._error is not None and not self._stopping:
                    raise self._error
                elif self.is_superseded:
                    raise RuntimeError(
                        "Prefetcher: another loop over it began while this one was under way, and "
                        "ended it; make a Prefetcher for each"
                    )
                else:
                    return
            yield item

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the thread and waits for it; the source is closed."""
        with self._change:
            # What was taken to the end stays ended.
            self._stopping = self._stopping or not self.is_exhausted
            self._change.notify_all()
        self._thread.join(timeout_s)
        self._ready.clear()
        _RUNNING.discard(self)

    def _run(self) -> None:
        try:
            for batch in self._source:
                item = self._make(batch)
                with self._change:
                    self._change.wait_for(lambda: len(self._ready) < self._depth or self._stopping)
                    if self._stopping:
                        break
                    self._ready.append(item)
                    self._change.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            close = getattr(self._source, "close", None)
            if close is not None:
                close()
            with self._change:
                self._ended = True
                self._change.notify_all()
