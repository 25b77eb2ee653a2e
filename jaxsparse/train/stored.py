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
from jaxsparse.store.known_rows import rates
from jaxsparse.train.state import TrainState

SUMS = ("batches", "new_keys", "evicted_keys", "host_to_device_bytes", "device_to_host_bytes")
"""Facts of passes that are added up in a row of the history."""

WAITS = ("plan", "data", "row", "device", "ram", "ssd")
"""What was waited for; ``data`` is a part of ``plan``, the last three are parts of ``row``."""

ROWS = ("device_rows", "host_rows", "ssd_rows")

Enter = Callable[[Callable[[EmbeddingState], EmbeddingState], dict[str, Any]], None]


def stored_batches(
    store: RowStore,
    batches: Iterator[Batch],
    needed: Callable[[], int | None],
    enter: Enter,
    batches_per_pass: int | None = None,
) -> Iterator[tuple[Batch, PackedBatch]]:
    """The batches of a pass over the data, each once its rows are on the devices.

    Args:
        store: of the rows.
        batches: as they are to be trained.
        needed: how many the run still needs, if known: no key of a batch behind them is looked at.
        enter: called between passes of the store, with what is to happen to the tables, and the
            facts of the pass.
        batches_per_pass: as in `RowStore.passes`.
    """
    while True:
        wanted, count = needed(), 0
        some = itertools.islice(batches, wanted)
        with contextlib.closing(  # type: ignore[type-var]
            store.passes(some, batches_per_pass=batches_per_pass)
        ) as passes:
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
    hits = [facts["hit_rate"] for facts in passes]
    return {
        "passes": len(passes),
        "batches_per_pass": sums.pop("batches") / len(passes),
        **sums,
        **moved,
        "hit_rate": sum(w * r for w, r in zip(weights, hits, strict=True)) / sum(weights),
        **{f"{what}_wait_ms": 1e3 * sum(f[f"{what}_wait_s"] for f in passes) for what in WAITS},
        "garbage": passes[-1]["garbage"],
        "tables": {name: _of_table(passes, name) for name in passes[-1]["tables"]},
    }


def _of_table(passes: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Size, rows by tier, and rates over all the passes."""
    told = [facts["tables"][name] for facts in passes]
    last = told[-1]
    counts = {what: sum(one[what] for one in told) for what in last if what not in ROWS}
    rows = {what: last[what] for what in ("size", *ROWS)}
    return {**rows, **rates(counts)}
