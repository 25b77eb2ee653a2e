# SPDX-License-Identifier: Apache-2.0
"""The worker that trains through a row store: ``python -m benchmarks.tier_task`` (see `workers`).

A step, as it is timed, is a whole pass of K batches from raw keys in host memory: planned, moved
and trained on, each overlapping the others as far as it does, until its last result is there.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np
import optax

import jaxsparse as js
from benchmarks.workers import peak_bytes, resident_bytes, serve
from benchmarks.workload import NUM_DENSE, RATE
from benchmarks.zipf_log import ZipfLog
from jaxsparse.models import DLRM
from jaxsparse.train.step import train_step

Tier = Literal["device", "ram", "ssd"]
TABLE = "t"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierWorkload:
    """A DLRM whose features share one table of Dynamic keys, and where its rows lie."""

    tier: Tier = "device"
    """``device``: all rows there; ``ram``: a slab and the host's memory; ``ssd``: disks too."""
    rows: int = 4_500_000
    """Rows the table has before anything is timed, at least; it grows while it is trained."""
    slab_share: float = 1 / 20
    """Of ``rows``, on the device."""
    ram_share: float = 0.14
    """Of ``rows``, in memory where there is a disk."""
    direct: bool = False
    """Whether disks are read past the page cache."""
    min_count: int = 1
    """Occurrences at which a key is admitted."""
    batches_per_pass: int = 2
    """K."""
    num_keys: int = 20_000_000
    """Of the log."""
    exponent: float = 1.05
    features: int = 26
    batch: int = 4096
    dim: int = 64
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (320, 160)
    """With ``bottom`` these make a step with all rows on the device take 90 to 110 ms on two cores
    of an EPYC of 2023."""
    steps: int = 400
    """That are going to be trained at most: they decide on the capacity."""
    passes: int = 5
    """Timed in a turn."""

    def __post_init__(self) -> None:
        """Takes lists, as JSON has them."""
        for name in ("bottom", "top"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def num_ids(self) -> int:
        """Occurrences of a batch."""
        return self.features * self.batch

    @property
    def capacity(self) -> int:
        """Rows the table can have: new keys of a batch become fewer as it grows."""
        return self.rows + self.num_ids // 8 * self.steps

    @property
    def slab_rows(self) -> int:
        """Rows on the device beside other tiers."""
        return int(self.slab_share * self.rows)

    @property
    def log(self) -> ZipfLog:
        """What is trained on."""
        return ZipfLog(num_keys=self.num_keys, exponent=self.exponent)

    def table(self, folder: str | None = None) -> js.TableSpec:
        """The table; ``folder`` for its disks."""
        tiers = None
        if self.tier != "device":
            on_disk = {"host_rows": int(self.ram_share * self.rows), "ssd": [folder or "."]}
            tiers = js.Tiers(device_rows=self.slab_rows, **(on_disk if self.tier == "ssd" else {}))
        admission = js.CountAdmission(self.min_count) if self.min_count > 1 else None
        return js.TableSpec(
            TABLE,
            embedding_dim=self.dim,
            keys=js.Dynamic(self.capacity, admission=admission),
            optimizer=js.Adagrad(RATE),
            tiers=tiers,
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return dataclasses.asdict(self)


class KeyedBatches:
    """Batches of the log one after another; those to be timed are drawn before the clock runs."""

    def __init__(self, workload: TierWorkload) -> None:
        """Draws nothing yet."""
        self.workload = workload
        self.number = 0
        self._ready: deque[js.Batch] = deque()
        rng = np.random.default_rng(0)
        self._dense = rng.standard_normal((workload.batch, NUM_DENSE), np.float32)
        self._labels = (rng.random(workload.batch) < 0.25).astype(np.float32)

    def draw(self, count: int) -> None:
        """Draws the next ``count`` batches into memory."""
        self._ready.extend(self._next() for _ in range(count))

    def _next(self) -> js.Batch:
        one = self.workload
        ranks = one.log.ranks(self.number, one.num_ids)
        self.number += 1
        keys = one.log.keys(ranks).reshape(one.features, one.batch)
        features = {f"f{n}": column for n, column in enumerate(keys)}
        return js.Batch(features, self._dense, self._labels)

    def __iter__(self) -> Iterator[js.Batch]:
        """Without end."""
        while True:
            yield self._ready.popleft() if self._ready else self._next()


class TierTask:
    """A table filled by the log's first batches, then trained on the following ones."""

    def __init__(self, workload: TierWorkload, folder: str | None = None) -> None:
        """Makes it all; rows lie below ``folder``, None is that of temporary files."""
        self.base = resident_bytes()
        self.workload = workload
        self._folder = tempfile.TemporaryDirectory(dir=folder)
        table = workload.table(self._folder.name)
        features = [js.FeatureSpec(f"f{n}", table) for n in range(workload.features)]
        self.emb = js.EmbeddingCollection(features, mesh=js.make_mesh())
        bottom = (*workload.bottom, workload.dim)
        model = DLRM.for_features(features, num_dense=NUM_DENSE, bottom=bottom, top=workload.top)
        self.trainer = js.Trainer(model, self.emb, optimizer=optax.adagrad(RATE))
        self.state = self.trainer.init(jax.random.key(0))
        # Its store reads disks through the page cache.
        assert self.trainer.store is not None
        self.trainer.store.close()
        self.store = js.RowStore(self.emb, self.state.embeddings, direct_io=workload.direct)
        self.batches = KeyedBatches(workload)
        most = workload.batches_per_pass
        self._passes = self.store.passes(self.batches, batches_per_pass=most)
        self.passes: list[dict[str, Any]] = []
        self._fill()
        self.facts = {
            "path": self.emb.path,
            "jax": jax.__version__,
            "fill_batches": self.batches.number,
            "device_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(self.state)),
            **self._counts(),
        }

    def _fill(self) -> None:
        """Rows come to be as in training, but no step is made with them."""
        while self.store.stats()[TABLE]["size"] < self.workload.rows:
            for _ in range(max(1, 32 // self.workload.batches_per_pass)):
                for _ in self._enter():
                    pass

    def _enter(self) -> js.Pass:
        one = next(self._passes)
        embeddings = self.store.enter(self.state.embeddings, one)
        self.state = dataclasses.replace(self.state, embeddings=embeddings)
        return one

    def step(self, number: int) -> None:
        """Trains on a pass; number 0 begins a turn, and is not timed."""
        if number == 0:
            self._begin_turn()
        one = self._enter()
        before = None
        for packed in one:
            self.state, outcome = train_step(self.trainer.program, self.state, packed)
            # One step is under way while the next is dispatched.
            jax.block_until_ready(before)
            before = outcome
        jax.block_until_ready((self.state, before))
        if number:
            self.passes.append(one.facts)

    def _begin_turn(self) -> None:
        """Draws all batches of the turn, and lets what is under way end."""
        self.batches.draw((self.workload.passes + 1) * self.workload.batches_per_pass)
        self.store.stats()

    def settle(self) -> None:
        """Every pass has waited for its last step."""

    def set_threads(self, count: int) -> None:
        raise ValueError("XLA's threads are given when the process starts")

    def _counts(self) -> dict[str, Any]:
        stats = self.store.stats()[TABLE]
        keys = ("size", "device_rows", "host_rows", "ssd_rows", "index", "inserts")
        disks = stats.get("ssd", {})
        return {
            **{key: stats[key] for key in keys},
            "reader": disks.get("implementation"),
            "garbage_rows": disks.get("garbage_rows", 0),
        }

    def memory(self) -> dict[str, Any]:
        """Resident now and at most, before the tables; rows by tier; means of the passes timed."""
        numbers = (name for name, value in self.passes[0].items() if not isinstance(value, dict))
        names = [name for name in numbers if name != "batches"]
        means = {name: float(np.mean([one[name] for one in self.passes])) for name in names}
        return {
            "resident_bytes": resident_bytes(),
            "peak_bytes": peak_bytes(),
            "base_bytes": self.base,
            **self._counts(),
            "pass": means,
        }


def prepare(workload: TierWorkload, options: dict[str, Any]) -> TierTask:
    """The task of a workload; option ``folder``."""
    return TierTask(workload, **options)


if __name__ == "__main__":
    serve(prepare, workload=TierWorkload)
