# SPDX-License-Identifier: Apache-2.0
"""From a dataset to what passes are planned from, and from a plan to what is shipped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.data.batch import Batch
from jaxsparse.data.prefetch import Prefetcher
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.ladder import Ladder
from jaxsparse.lockstep import Lockstep
from jaxsparse.packed_batch import ship_batch
from jaxsparse.processes import is_shared
from jaxsparse.store.key_exchange import JoinedBatch, KeyExchange, OwnBatch, own_batch
from jaxsparse.store.passes import Pack, Ready
from jaxsparse.store.together import Together
from jaxsparse.store.translate import Asked, KeyedBatch, keyed_batch, prepared_batch, prepared_empty

Codes = npt.NDArray[np.int64]
Clock = Callable[[Batch], float]


@dataclasses.dataclass(frozen=True)
class BatchStream:
    """The batches of one dataset."""

    source: Prefetcher[Any]
    """Draws them on a thread; to be closed."""
    asked: Iterator[Asked]
    """For a planner."""
    pack: Pack
    """Makes a planned batch ready, on a thread."""
    together: Together | None
    """What several processes do together; None for one."""


class BatchStreams:
    """Makes streams, those of one kind (training, reading) of few different sizes."""

    def __init__(self, emb: EmbeddingCollection) -> None:
        """Knows no batch yet."""
        self._emb = emb
        self._lockstep = Lockstep(emb, Ladder(), partial(prepared_empty, emb))

    def start(self, dataset: Iterable[Batch], clock: Clock | None, depth: int) -> BatchStream:
        """A stream of a dataset's batches; of several processes a collective is still to come.

        Args:
            dataset: iterated once, on a thread.
            clock: tells the time of a batch in seconds; None where nothing depends on it.
            depth: batches drawn ahead.
        """
        if is_shared(self._emb.mesh):
            own = Prefetcher(dataset, partial(self._own, clock), depth=depth)
            exchange = KeyExchange(self._emb.mesh, own)
            together = Together(exchange, self._lockstep)
            return BatchStream(own, exchange, self._prepare, together)
        source = Prefetcher(dataset, partial(keyed_batch, self._emb, clock), depth=depth)
        return BatchStream(source, iter(source), self._pack, None)

    def _own(self, clock: Clock | None, batch: Batch) -> OwnBatch:
        return own_batch(keyed_batch(self._emb, clock, batch))

    def _pack(self, keyed: KeyedBatch, codes: dict[str, Codes]) -> Ready:
        prepared, ladder = prepared_batch(self._emb, keyed, codes), self._lockstep.ladder
        return keyed.batch, ship_batch(self._emb, prepared, prepared.ids.needs(), ladder)

    def _prepare(self, joined: JoinedBatch, codes: dict[str, Codes]) -> Ready:
        """Of this process's samples; None where it has no batch left."""
        if joined.own is None:
            return None
        return prepared_batch(self._emb, joined.own.keyed, joined.own_codes(codes))
