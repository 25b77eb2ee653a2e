# SPDX-License-Identifier: Apache-2.0
"""Which keys get a row of their own: what `jaxsparse.dynamic` declares, on the keys of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jaxsparse.dynamic import (
    MAX_BLOOM_COUNT,
    MAX_CAPACITY,
    Admission,
    BloomAdmission,
    CountAdmission,
)
from jaxsparse.fingerprint import mix64
from jaxsparse.store.growing import grown
from jaxsparse.store.index import KeyIndex

Keys = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

WAITING_KEYS, WAITING_COUNTS, BLOOM = "waiting.keys", "waiting.counts", "bloom"
"""Arrays of what is remembered."""

NUM_HASHES = 4
"""Counters of a key in a Bloom filter."""


class Admitter(Protocol):
    """Decides on the keys of a batch that have no row, and remembers those it has turned away."""

    @property
    def nbytes(self) -> int:
        """Memory of what it remembers."""
        ...

    def decide(self, keys: Keys, counts: Counts, step: int) -> Mask:
        """Which of distinct keys ``[n]`` get a row; changes nothing.

        Args:
            keys: that have none.
            counts: ``[n]`` occurrences in the batch.
            step: number of the batch.
        """
        ...

    def book(self, keys: Keys, counts: Counts, admitted: Mask) -> None:
        """Remembers what `decide` said of a batch that is going to be trained."""
        ...

    def arrays(self) -> dict[str, Any]:
        """What it remembers, for `take_in`."""
        ...

    def take_in(self, arrays: Mapping[str, Any]) -> None:
        """Starts with what `arrays` returned."""
        ...


class AdmitAll:
    """Every key gets a row."""

    nbytes = 0

    def decide(self, keys: Keys, counts: Counts, step: int) -> Mask:
        """See `Admitter`."""
        del counts, step
        return np.ones(keys.size, bool)

    def book(self, keys: Keys, counts: Counts, admitted: Mask) -> None:
        """See `Admitter`."""

    def arrays(self) -> dict[str, Any]:
        """See `Admitter`."""
        return {}

    def take_in(self, arrays: Mapping[str, Any]) -> None:
        """See `Admitter`."""


class AdmitByCount:
    """Exact counts of the keys that wait; a key that is admitted, and one that lost its row, is
    counted from nothing."""

    def __init__(self, min_count: int) -> None:
        """Starts with nothing counted."""
        self._min_count = min_count
        self._index = KeyIndex(MAX_CAPACITY)
        self._counts = np.zeros(0, np.int32)

    @property
    def nbytes(self) -> int:
        """See `Admitter`."""
        return int(self._index.nbytes + self._counts.nbytes)

    def decide(self, keys: Keys, counts: Counts, step: int) -> Mask:
        """See `Admitter`."""
        del step
        return self.counts(keys) + counts >= self._min_count

    def book(self, keys: Keys, counts: Counts, admitted: Mask) -> None:
        """See `Admitter`."""
        waiting = np.flatnonzero(~admitted)
        rows = self._index.insert(keys[waiting])
        self._counts = grown(self._counts, self._index.high_water, 0)
        self._counts[rows] += counts[waiting].astype(np.int32)
        done = self._index.find(keys[admitted])
        done = done[done >= 0]
        self._counts[done] = 0
        self._index.remove(done)

    def arrays(self) -> dict[str, Any]:
        """See `Admitter`."""
        rows = self._index.rows()
        return {WAITING_KEYS: self._index.keys_of(rows), WAITING_COUNTS: self._counts[rows]}

    def take_in(self, arrays: Mapping[str, Any]) -> None:
        """See `Admitter`."""
        self._index = KeyIndex(MAX_CAPACITY)
        rows = self._index.insert(arrays[WAITING_KEYS])
        self._counts = grown(np.zeros(0, np.int32), self._index.high_water, 0)
        self._counts[rows] = arrays[WAITING_COUNTS]

    def counts(self, keys: Keys) -> Counts:
        """Occurrences ``[n]`` so far of keys that wait; 0 for others."""
        rows = self._index.find(keys)
        known = rows >= 0
        counts = np.zeros(keys.size, np.int64)
        counts[known] = self._counts[rows[known]]
        return counts


class AdmitByBloomCount:
    """Counts in a counting Bloom filter, updated conservatively."""

    def __init__(self, min_count: int, num_bytes: int) -> None:
        """Starts with nothing counted, in ``num_bytes`` of memory."""
        self._min_count = min_count
        self._counters = np.zeros(num_bytes, np.uint8)

    @property
    def nbytes(self) -> int:
        """See `Admitter`."""
        return self._counters.nbytes

    def decide(self, keys: Keys, counts: Counts, step: int) -> Mask:
        """See `Admitter`."""
        del step
        return self.counts(keys) + counts >= self._min_count

    def book(self, keys: Keys, counts: Counts, admitted: Mask) -> None:
        """See `Admitter`."""
        del admitted  # a filter forgets nobody
        places = self._places(keys)
        raised = self._counters[places].min(axis=0, initial=255).astype(np.int64) + counts
        # Counters of several keys get the largest of what these want: never too low.
        raised = np.minimum(raised, MAX_BLOOM_COUNT).astype(np.uint8)
        np.maximum.at(self._counters, places, raised[None, :])

    def arrays(self) -> dict[str, Any]:
        """See `Admitter`."""
        return {BLOOM: self._counters}

    def take_in(self, arrays: Mapping[str, Any]) -> None:
        """See `Admitter`."""
        self._counters = np.array(arrays[BLOOM], np.uint8)

    def counts(self, keys: Keys) -> Counts:
        """At least the occurrences ``[n]`` of keys so far, up to 255."""
        if not keys.size:
            return np.zeros(0, np.int64)
        counts: Counts = self._counters[self._places(keys)].min(axis=0).astype(np.int64)
        return counts

    def _places(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Counters ``[4, n]`` of keys (Kirsch, Mitzenmacher 2006: two hashes make all)."""
        first = mix64(keys)
        second = mix64(first) | np.uint64(1)
        times = np.arange(NUM_HASHES, dtype=np.uint64)[:, None]
        places = (first[None, :] + times * second[None, :]) % np.uint64(self._counters.size)
        return places.astype(np.int64)


class AdmitByChance:
    """A coin for every occurrence, thrown by hash."""

    nbytes = 0

    def __init__(self, p: float, seed: int) -> None:
        """Takes the probability of one occurrence."""
        self._p, self._seed = p, seed

    def decide(self, keys: Keys, counts: Counts, step: int) -> Mask:
        """See `Admitter`."""
        salt = mix64(np.array([self._seed], np.uint64) ^ mix64(np.array([step], np.uint64)))
        drawn = (mix64(keys ^ salt) >> np.uint64(11)).astype(np.float64) / 2.0**53
        return drawn < -np.expm1(counts * np.log1p(-self._p)) if self._p < 1 else counts > 0

    def book(self, keys: Keys, counts: Counts, admitted: Mask) -> None:
        """See `Admitter`."""

    def arrays(self) -> dict[str, Any]:
        """See `Admitter`."""
        return {}

    def take_in(self, arrays: Mapping[str, Any]) -> None:
        """See `Admitter`."""


def make_admitter(admission: Admission | None) -> Admitter:
    """The machinery of a declaration."""
    if admission is None:
        return AdmitAll()
    if isinstance(admission, CountAdmission):
        return AdmitByCount(admission.min_count)
    if isinstance(admission, BloomAdmission):
        return AdmitByBloomCount(admission.min_count, admission.bytes)
    return AdmitByChance(admission.p, admission.seed)
