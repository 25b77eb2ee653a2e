# SPDX-License-Identifier: Apache-2.0
"""From the features of a batch to the keys each stored table is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jaxsparse.addressing import Addressing
from jaxsparse.data.batch import Batch
from jaxsparse.dynamic import Dynamic
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.encode import FixedIds, RaggedIds, encode_with
from jaxsparse.fingerprint import fingerprint_flat, parse_keys
from jaxsparse.hashing import Identity
from jaxsparse.packed_batch import PreparedBatch
from jaxsparse.prepared import check_features
from jaxsparse.specs import FeatureSpec, TableSpec

Keys = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]
Ids = FixedIds | RaggedIds


def key_words(spec: TableSpec, keys: npt.ArrayLike) -> tuple[Keys, npt.NDArray[np.bool_] | None]:
    """What a stored table knows keys by: 64 bits each, and which of them it takes.

    Args:
        spec: the table.
        keys: of any shape: integers, or strings where the table takes them.

    Returns:
        ``[n]`` and ``[n]`` bool (None for all): a Dynamic table's keys themselves (strings by
        their fingerprint), else row numbers.

    Raises:
        ValueError, TypeError: a key the table does not take.
    """
    if isinstance(spec.keys, Dynamic):
        _, flat = parse_keys(keys)
        return flat if isinstance(flat, np.ndarray) else fingerprint_flat(flat), None
    ids = spec.keys.rows(keys, spec.vocabulary_size).reshape(-1)
    is_lenient = isinstance(spec.keys, Identity) and spec.keys.out_of_range == "ignore"
    return ids.view(np.uint64), ids >= 0 if is_lenient else None


def numbers_to_draw(spec: TableSpec, words: Keys) -> Keys:
    """What the initial rows of ``words`` are drawn from: keys, or as in a plain table positions."""
    if isinstance(spec.keys, Dynamic):
        return words
    return Addressing(spec.vocabulary_size).position(words.view(np.int64)).view(np.uint64)


class Asked(Protocol):
    """What a planner sees of a batch."""

    @property
    def keys(self) -> Mapping[str, Keys]:
        """By stored table, its entries: keys that it is asked for."""
        ...

    @property
    def times_seen(self) -> Mapping[str, Counts] | None:
        """By table, occurrences that each entry stands for; None where it is one."""
        ...

    @property
    def time(self) -> float:
        """Of its data, in seconds; 0 where nothing depends on it."""
        ...


@dataclasses.dataclass
class KeyedBatch:
    """A batch whose stored features are parsed, checked and cut; keys are not yet rows."""

    batch: Batch
    ids: dict[str, Ids]
    """By feature of a stored table, with 64 bits of a key in place of each code."""
    keys: dict[str, Keys]
    """By stored table, all occurrences, feature by feature."""
    time: float = 0.0
    """Of its data, in seconds."""

    @property
    def times_seen(self) -> None:
        """None: an entry is an occurrence."""

    @property
    def num_samples(self) -> int:
        """Samples of the batch."""
        return self.batch.num_samples

    def with_codes(
        self, codes: Mapping[str, npt.NDArray[np.int64]], features: Mapping[str, FeatureSpec]
    ) -> dict[str, Ids]:
        """The ids with codes by table in place of keys, for `prepare_addressed`."""
        start = dict.fromkeys(codes, 0)
        addressed = {}
        for name, ids in self.ids.items():
            table = features[name].table.name
            first = start[table]
            start[table] = first + ids.codes.size
            part = codes[table][first : start[table]].reshape(ids.codes.shape)
            addressed[name] = dataclasses.replace(ids, codes=part)
        return addressed


def keyed_batch(
    emb: EmbeddingCollection, clock: Callable[[Batch], float] | None, batch: Batch
) -> KeyedBatch:
    """Parses the stored features of a batch; pure, any thread may do it.

    Args:
        emb: the collection.
        clock: tells the time of a batch in seconds; None where nothing depends on it.
        batch: the batch.

    Raises:
        ValueError, TypeError: as `EmbeddingCollection.pack`.
    """
    num_samples = check_features(emb.feature_specs, batch.features)
    if num_samples != batch.num_samples:
        raise ValueError(
            f"features have {num_samples} samples, labels {batch.num_samples}: they must agree"
        )
    ids: dict[str, Ids] = {}
    parts: dict[str, list[Keys]] = {name: [] for name in emb.stored_tables}
    for spec in emb.features:
        if spec.table.is_stored:
            found = encode_with(spec, _finder(spec), batch.features[spec.name])
            ids[spec.name] = found
            parts[spec.table.name].append(found.codes.reshape(-1).view(np.uint64))
    keys = {
        name: part[0] if len(part) == 1 else np.concatenate(part) for name, part in parts.items()
    }
    # Of no samples a clock need not know the time.
    time = float(clock(batch)) if clock is not None and num_samples else 0.0
    return KeyedBatch(batch, ids, keys, time)


def prepared_batch(
    emb: EmbeddingCollection, keyed: KeyedBatch, codes: Mapping[str, npt.NDArray[np.int64]]
) -> PreparedBatch:
    """A batch made ready, with codes by table in place of its keys."""
    ids = keyed.with_codes(codes, emb.feature_specs)
    return PreparedBatch(keyed.batch, emb.prepare_addressed(keyed.batch.features, ids))


def prepared_empty(emb: EmbeddingCollection, batch: Batch) -> PreparedBatch:
    """A batch without samples made ready: there is no key to find a code for."""
    keyed = keyed_batch(emb, None, batch)
    return prepared_batch(emb, keyed, {n: k.view(np.int64) for n, k in keyed.keys.items()})


def _finder(spec: FeatureSpec) -> Callable[[Any], Any]:
    def find(keys: npt.NDArray[Any]) -> Any:
        words, taken = key_words(spec.table, keys)
        return words.view(np.int64), taken

    return find
