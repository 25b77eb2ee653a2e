# SPDX-License-Identifier: Apache-2.0
"""How often a row is on the device when its pass is planned: no times, the same on every machine.

Of a steady Zipf log, and after its hot keys were exchanged for others; against the best fixed set
of as many rows, which is that of the log's most probable keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import jaxsparse as js
from benchmarks.report import Result, requirement
from benchmarks.zipf_log import ZipfLog

LEAST_STEADY = 0.95
"""Of the hits of the best set."""
LEAST_EXCHANGED, PASSES = 0.9, 10
"""The same, within so many passes after the exchange."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HitWorkload:
    """A log, and a slab for some of its keys."""

    num_keys: int = 20_000_000
    """Of the log."""
    slab_rows: int = 225_000
    batch: int = 106_496
    """Keys of a batch."""
    batches_per_pass: int = 2
    steady_passes: int = 60
    """Before the exchange; the last `PASSES` of them are counted."""

    @property
    def log(self) -> ZipfLog:
        """The keys of the batches."""
        return ZipfLog(num_keys=self.num_keys)

    def batches(self) -> Iterator[js.Batch]:
        """The log, exchanged after the steady passes."""
        steady = self.steady_passes * self.batches_per_pass
        for number in range(steady + PASSES * self.batches_per_pass):
            ranks = self.log.ranks(number, self.batch)
            keys = self.log.keys(ranks, exchanged=number >= steady)
            yield js.Batch({"f": keys}, labels=ranks <= self.slab_rows)


def measure_hits(workload: HitWorkload | None = None) -> Result:
    """Hits by pass over those of the best set; nothing is trained, rows only move."""
    one = workload or HitWorkload()
    table = js.TableSpec(
        "t",
        embedding_dim=1,
        keys=js.Dynamic(one.num_keys),
        tiers=js.Tiers(device_rows=one.slab_rows),
    )
    emb = js.EmbeddingCollection([js.FeatureSpec("f", table)], mesh=js.make_mesh())
    state = emb.init(jax.random.key(0))
    store = js.RowStore(emb, state)
    hits, best = [], []
    for p in store.passes(one.batches(), batches_per_pass=one.batches_per_pass):
        state = store.enter(state, p)
        best.append(float(np.mean([batch.labels.mean() for batch, _ in p.with_batches()])))
        hits.append(float(p.facts["hit_rate"]))
    store.close()
    steady = slice(one.steady_passes - PASSES, one.steady_passes)
    after = [h / b for h, b in zip(hits[-PASSES:], best[-PASSES:], strict=True)]
    share = float(np.mean(hits[steady]) / np.mean(best[steady]))
    return {
        "slab_rows": one.slab_rows,
        "num_keys": one.num_keys,
        "keys_per_pass": one.batch * one.batches_per_pass,
        "steady": share,
        "best_hit_rate": float(np.mean(best[steady])),
        "after_exchange": after,
        "requirements": [
            requirement("hits of a steady log, of the best set's", share, LEAST_STEADY),
            requirement("the same, ten passes after an exchange", max(after), LEAST_EXCHANGED),
        ],
    }


def hit_lines(result: Result) -> list[str]:
    """The result for people."""
    after: list[Any] = [f"{share:.2f}" for share in result["after_exchange"]]
    return [
        f"hits: {result['steady']:.3f} of the best set's ({result['best_hit_rate']:.3f}); by pass "
        f"after the hot keys were exchanged {' '.join(after)}"
    ]
