# SPDX-License-Identifier: Apache-2.0
"""Batches of several processes, step by step together: agreed sizes, empty batches, shared errors.

Before a step every process votes on its next batch: whether it has one, its form, its sizes. One
small maximum settles it, dispatched a batch ahead, so that it is read while the step before runs.
A process without a batch goes on with an empty one until none has any, and what keeps one process
from going on is raised by all of them at the same step: nobody waits in a collective for ever.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxsparse.agreement import abstain, failed_elsewhere, fingerprint, num_votes, settle, vote
from jaxsparse.data.batch import Batch
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.ladder import Ladder, bucket
from jaxsparse.packed_batch import (
    PackedBatch,
    PreparedBatch,
    pack_batch,
    prepare_batch,
    ship_batch,
)
from jaxsparse.processes import NOTHING, Int32s, is_shared, maximum, start_maximum
from jaxsparse.ragged import Ragged

Settled = tuple[Batch, PackedBatch]
Ready = PreparedBatch | Settled

NUM_VOTES = 7
"""failed, stop, the form's length and fingerprints; those of the ids follow."""


@dataclasses.dataclass(frozen=True)
class Offer:
    """A process's next batch, and the vote on it under way."""

    prepared: PreparedBatch | None
    """None where the process has no batch left."""
    error: Exception | None
    votes: jax.Array


class Lockstep:
    """Ships batches to the mesh, in several processes together; keeps the run's `Ladder`."""

    def __init__(
        self,
        emb: EmbeddingCollection,
        ladder: Ladder,
        prepare: Callable[[Batch], PreparedBatch] | None = None,
    ) -> None:
        """Starts knowing no batch.

        Args:
            emb: the tables.
            ladder: sizes of the run's batches; equal in every process, as all feed it alike.
            prepare: makes a batch ready, an empty one among others; None for `prepare_batch`.
        """
        self.emb = emb
        self.ladder = ladder
        self._prepare = partial(prepare_batch, emb) if prepare is None else prepare
        self.stop_requested = False
        """Set it at any time, from a signal handler too: all processes stop at one step."""
        self.stop_agreed = False
        """Whether some process had asked to stop when the last batch was settled."""
        self._form = ""
        self._slabs = len(emb.layout.slabs)

    def ready(self, batch: Batch) -> Ready:
        """What a thread may do ahead for `batches`, one batch after another; no collective.

        In one process that is all of packing. In several, sizes are settled by a vote, and all
        processes have to issue the same collectives in the same order, votes among steps: only the
        thread that dispatches the steps can keep to one. So there the batch is prepared, which is
        the larger part, and that thread does the rest.
        """
        if is_shared(self.emb.mesh):
            return prepare_batch(self.emb, batch)
        return batch, pack_batch(self.emb, batch, self.ladder)

    def batches(self, source: Iterator[Ready]) -> Iterator[Settled]:
        """The batches and what was shipped, until no process has any; a collective each.

        In several processes one batch more than was yielded has been drawn from ``source``.
        """
        if not is_shared(self.emb.mesh):
            for item in source:
                assert not isinstance(item, PreparedBatch), "made by `ready`"
                self.stop_agreed = self.stop_requested
                yield item
            return
        ahead = self._offer_next(source)
        while (settled := self.settle(ahead)) is not None:
            ahead = self._offer_next(source)
            if settled[1].weights.shape[0]:  # else every process's batch was empty
                yield settled

    def pack(self, batch: Batch, error: Exception | None = None) -> Settled | None:
        """Ships one batch, not ahead; None where no process has a sample. A collective.

        Raises:
            Exception: ``error``, or what `settle` raises.
        """
        if not is_shared(self.emb.mesh):
            return batch, pack_batch(self.emb, batch, self.ladder)
        settled = self.settle(self.offer(batch, error))
        return settled if settled is not None and settled[1].weights.shape[0] else None

    def offer(self, item: Batch | Ready | None, error: Exception | None = None) -> Offer:
        """Votes on a batch, on None for having none left, or on an error; a collective."""
        prepared = None
        try:
            if item is not None:
                assert not isinstance(item, tuple), "made by `ready`"
                prepared = item if isinstance(item, PreparedBatch) else self._prepare(item)
        except (ValueError, TypeError) as refused:
            error = refused
        votes = start_maximum(self.emb.mesh, self._votes(prepared, error))
        return Offer(prepared, error, votes)

    def settle(self, offer: Offer) -> Settled | None:
        """The batch on the mesh, padded as all agreed; None where no process has one left.

        Raises:
            Exception: the offer's error, or where another process failed a RuntimeError.
            ValueError: the processes' batches differ in form.
        """
        votes = np.asarray(offer.votes)
        if votes[0]:
            raise offer.error or failed_elsewhere(votes[0] - 1)
        self.stop_agreed = bool(votes[1])
        if votes[4] == NOTHING:
            return None
        form = self._agree_on_form(votes)
        prepared = offer.prepared or self._prepare(empty_batch(form))
        ids, needs = settle(self.emb.mesh, prepared.ids, votes[NUM_VOTES:])
        agreed = PreparedBatch(prepared.batch, ids)
        return prepared.batch, ship_batch(self.emb, agreed, needs, self.ladder)

    def _offer_next(self, source: Iterator[Ready]) -> Offer:
        try:
            return self.offer(next(source, None))
        except Exception as error:
            return self.offer(None, error)

    def _votes(self, prepared: PreparedBatch | None, error: Exception | None) -> list[int]:
        failed = 0 if error is None else 1 + jax.process_index()
        if prepared is None:
            known = fingerprint(self._form) if self._form else 0
            own = [NOTHING, NOTHING, NOTHING, known, -known]
            ids = abstain(self._slabs)
        else:
            self._form = form_of(prepared)
            known = fingerprint(self._form)
            own = [len(self._form.encode()), -known, known, known, -known]
            ids = vote(prepared.ids)
        assert len(ids) == num_votes(self._slabs)
        return [failed, int(self.stop_requested), *own, *ids]

    def _agree_on_form(self, votes: Int32s) -> str:
        """The form all batches have; those who do not know it are told."""
        length, fewest, most, known_most, known_fewest = (int(v) for v in votes[2:7])
        if -fewest != most:
            raise ValueError(
                "the batches of the processes must have one form; process "
                f"{jax.process_index()} has {self._form}"
            )
        if known_most != most or -known_fewest != most:
            letters = np.full(bucket(length), NOTHING, np.int32)
            if self._form and fingerprint(self._form) == most:
                text = np.frombuffer(self._form.encode(), np.uint8)
                letters[: text.size] = text
            told = maximum(self.emb.mesh, letters)[:length]
            self._form = told.astype(np.uint8).tobytes().decode()
        return self._form


def form_of(prepared: PreparedBatch) -> str:
    """All that programs see of a batch but its sizes, as JSON."""
    batch = prepared.batch
    features: dict[str, Any] = {}
    for part in prepared.ids.features:
        features |= {name: fixed.codes.shape[1] for name, fixed in part.fixed.items()}
        for name, ragged in part.ragged.items():
            features[name] = "bags" if ragged.weights is None else "weighted bags"
    tasks = sorted(batch.labels) if isinstance(batch.labels, dict) else None
    dense = None if batch.dense is None else batch.dense.shape[1]
    return json.dumps({"features": features, "dense": dense, "tasks": tasks}, sort_keys=True)


def empty_batch(form: str) -> Batch:
    """A batch without samples.

    >>> empty = empty_batch('{"features": {"item": 1, "seen": "bags"}, "dense": 3, "tasks": null}')
    >>> empty.num_samples, empty.dense.shape
    (0, (0, 3))
    """
    told = json.loads(form)
    nothing = np.zeros(0, np.float32)

    def column(kind: int | str) -> Any:
        if isinstance(kind, int):
            return np.zeros((0, kind), np.int64)
        weights = nothing if kind == "weighted bags" else None
        return Ragged(np.zeros(0, np.int64), np.zeros(1, np.int64), weights)

    return Batch(
        {name: column(kind) for name, kind in told["features"].items()},
        None if told["dense"] is None else np.zeros((0, told["dense"]), np.float32),
        nothing if told["tasks"] is None else dict.fromkeys(told["tasks"], nothing),
    )
