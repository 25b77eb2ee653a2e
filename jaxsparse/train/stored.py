# SPDX-License-Identifier: Apache-2.0
"""Training with a `RowStore`: batches in passes, and what their rows cost."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxsparse.data.batch import Batch
from jaxsparse.packed_batch import PackedBatch
from jaxsparse.state import EmbeddingState
from jaxsparse.store import RowStore
from jaxsparse.train.state import TrainState

SUMS = ("batches", "new_keys", "evicted_keys", "host_to_device_bytes", "device_to_host_bytes")
"""Facts of passes that are added up in a row of the history."""

Enter = Callable[[Callable[[EmbeddingState], EmbeddingState], dict[str, Any]], None]


def stored_batches(
    store: RowStore, batches: Iterator[Batch], needed: Callable[[], int | None], enter: Enter
) -> Iterator[tuple[Batch, PackedBatch]]:
    """The batches of a pass over the data, each once its rows are on the devices.

    Args:
        store: of the rows.
        batches: as they are to be trained.
        needed: how many the run still needs, if known: no key of a batch behind them is looked at.
        enter: called between passes of the store, with what is to happen to the tables, and the
            facts of the pass.
    """
    while True:
        wanted, count = needed(), 0
        with contextlib.closing(store.passes(itertools.islice(batches, wanted))) as passes:  # type: ignore[type-var]
            for p in passes:
                enter(lambda tables, p=p: store.enter(tables, p), p.facts)  # type: ignore[misc]
                for item in p.with_batches():
                    count += 1
                    yield item
        if wanted is None or count < wanted:
            return


def one_batch(store: RowStore, state: TrainState, batch: Batch) -> tuple[TrainState, PackedBatch]:
    """The state with the rows of a batch on the devices, and the batch."""
    with contextlib.closing(store.passes([batch])) as passes:  # type: ignore[type-var]
        for p in passes:
            state = dataclasses.replace(state, embeddings=store.enter(state.embeddings, p))
            packed = next(iter(p))
    return state, packed


def summarise(passes: Sequence[dict[str, Any]], moved: dict[str, int]) -> dict[str, Any]:
    """Part of a row of the history.

    Args:
        passes: facts of those entered since the row before.
        moved: bytes by tier and direction since then.
    """
    if not passes:
        return {}
    sums = {name: sum(facts[name] for facts in passes) for name in SUMS}
    weights = [facts["batches"] for facts in passes]
    rates = [facts["hit_rate"] for facts in passes]
    return {
        "passes": len(passes),
        "batches_per_pass": sums.pop("batches") / len(passes),
        **sums,
        **moved,
        "hit_rate": sum(w * r for w, r in zip(weights, rates, strict=True)) / sum(weights),
        "plan_wait_ms": 1e3 * sum(facts["plan_wait_s"] for facts in passes),
        "row_wait_ms": 1e3 * sum(facts["row_wait_s"] for facts in passes),
    }
