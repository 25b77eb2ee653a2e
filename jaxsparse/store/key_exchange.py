# SPDX-License-Identifier: Apache-2.0
"""The keys of all processes' batches, which each process tells the others once a pass.

Every process then plans the same passes from the same keys; what becomes of a key cannot depend on
how samples are cut over processes. Only keys and how often each occurs cross.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from jaxsparse.agreement import failed_elsewhere
from jaxsparse.processes import gather
from jaxsparse.store.translate import Counts, KeyedBatch, Keys

Codes = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class TableKeys:
    """Distinct keys of one table in a process's batch."""

    keys: Keys
    """``[u]``, ascending."""
    times_seen: npt.NDArray[np.int32]
    """``[u]`` occurrences of each."""


@dataclasses.dataclass(frozen=True)
class OwnBatch:
    """A batch of this process, and its distinct keys."""

    keyed: KeyedBatch
    tables: dict[str, TableKeys]
    """By stored table."""
    inverse: dict[str, npt.NDArray[np.int64]]
    """By table, index of the key of each occurrence."""


def own_batch(keyed: KeyedBatch) -> OwnBatch:
    """Finds the distinct keys of a batch; any thread may do it."""
    tables, inverse = {}, {}
    for name, keys in keyed.keys.items():
        distinct, inverse[name], counts = np.unique(keys, return_inverse=True, return_counts=True)
        tables[name] = TableKeys(distinct, counts.astype(np.int32))
    return OwnBatch(keyed, tables, inverse)


@dataclasses.dataclass(frozen=True)
class Told:
    """What a process tells of one of its batches."""

    num_samples: int
    time: float
    tables: dict[str, TableKeys]


@dataclasses.dataclass(frozen=True)
class Offer:
    """What a process tells at one exchange."""

    process: int
    is_failed: bool
    """It cannot go on at all."""
    ends: bool
    """It was asked to plan no further pass."""
    batches: list[Told]
    has_error: bool
    """Whether its next batch could not be made."""
    is_last: bool
    """Whether it has no more behind these."""


@dataclasses.dataclass(frozen=True)
class JoinedBatch:
    """The batches of all processes at one step, as a planner sees them (`translate.Asked`)."""

    keys: Mapping[str, Keys]
    """By table, distinct keys of each process, one process after another."""
    times_seen: Mapping[str, Counts]
    time: float
    """The latest of the processes'."""
    own: OwnBatch | None
    """That of this process; None where it has none left."""
    parts: Mapping[str, slice]
    """By table, which of the entries are this process's."""

    def own_codes(self, codes: Mapping[str, Codes]) -> dict[str, Codes]:
        """Codes by table of this process's occurrences, of the codes of the entries."""
        assert self.own is not None
        return {
            name: codes[name][part][self.own.inverse[name]] for name, part in self.parts.items()
        }


def join(told: Sequence[Told | None], own: OwnBatch | None, index: int) -> JoinedBatch:
    """One batch of all processes.

    Args:
        told: by process; None where it has no batch. At least one has samples.
        own: of this process.
        index: of this process among them.
    """
    batches = [one for one in told if one is not None]
    keys, times_seen, parts = {}, {}, {}
    for name in batches[0].tables:
        tables = [one.tables[name] for one in batches]
        keys[name] = np.concatenate([table.keys for table in tables])
        times_seen[name] = np.concatenate([t.times_seen for t in tables]).astype(np.int64)
        before = sum(one.tables[name].keys.size for one in told[:index] if one is not None)
        size = 0 if own is None else own.tables[name].keys.size
        parts[name] = slice(before, before + size)
    time = max(one.time for one in batches if one.num_samples)
    return JoinedBatch(keys, times_seen, time, own, parts)


class KeyExchange:
    """The batches of all processes, for a planner that reads no further than was exchanged."""

    def __init__(self, mesh: Mesh, source: Iterable[OwnBatch]) -> None:
        """Has exchanged nothing yet; ``source`` gives this process's batches, once."""
        self._mesh, self._source = mesh, source
        self._batches: Iterator[OwnBatch] | None = None
        self._ready: deque[JoinedBatch | Exception] = deque()
        self._is_last = False

    def __len__(self) -> int:
        """Batches that were exchanged and not taken."""
        return len(self._ready)

    def __iter__(self) -> Iterator[JoinedBatch]:
        return self

    def __next__(self) -> JoinedBatch:
        """The next batch.

        Raises:
            StopIteration: there is none.
            Exception: what keeps this process, or another one, from making it.
        """
        if not self._ready:
            raise StopIteration
        item = self._ready.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    def exchange(self, count: int, failure: BaseException | None, ends: bool) -> bool:
        """Draws ``count`` more batches, where there are so many, and tells all; a collective.

        Args:
            count: equal in all processes.
            failure: what keeps this process from going on.
            ends: whether this process is to plan no further pass.

        Returns:
            Whether some process is to plan no further pass.

        Raises:
            Exception: ``failure``, or where another process has one a RuntimeError.
        """
        own, error = self._draw(0 if failure is not None else count)
        told = [Told(one.keyed.num_samples, one.keyed.time, one.tables) for one in own]
        is_last = len(own) < count
        process = jax.process_index()
        offer = Offer(process, failure is not None, ends, told, error is not None, is_last)
        offers = gather(self._mesh, offer)
        for other in offers:
            if other.is_failed:
                raise failure or failed_elsewhere(other.process)
        self._take(offers, own, error)
        return any(other.ends for other in offers)

    def _draw(self, count: int) -> tuple[list[OwnBatch], Exception | None]:
        own: list[OwnBatch] = []
        if self._is_last:
            return own, None
        try:
            if self._batches is None:
                self._batches = iter(self._source)
            for one in itertools.islice(self._batches, count):
                own.append(one)
        except Exception as error:
            return own, error
        return own, None

    def _take(self, offers: Sequence[Offer], own: list[OwnBatch], error: Exception | None) -> None:
        ends_at = {
            len(offer.batches): offer.process for offer in reversed(offers) if offer.has_error
        }
        most = max(len(offer.batches) for offer in offers)
        index = [offer.process for offer in offers].index(jax.process_index())
        for number in range(min([most, *ends_at])):
            told = [o.batches[number] if number < len(o.batches) else None for o in offers]
            if any(one is not None and one.num_samples for one in told):
                mine = own[number] if number < len(own) else None
                self._ready.append(join(told, mine, index))
        if ends_at:
            process = ends_at[min(ends_at)]
            mine_failed = error is not None and len(own) == min(ends_at)
            self._ready.append(
                error if mine_failed and error is not None else failed_elsewhere(process)
            )
        # Whoever has ended is asked no more.
        self._is_last = self._is_last or offers[index].is_last or bool(ends_at)
