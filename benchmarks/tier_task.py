# SPDX-License-Identifier: Apache-2.0
"""The worker that trains through a row store: ``python -m benchmarks.tier_task`` (see `workers`).

A step, as it is timed, is a whole pass of K batches from raw keys in host memory: planned, moved
and trained on, each overlapping the others as far as it does, until its last result is there.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import tempfile
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any, Literal

import jax
import numpy as np
import optax

import jaxsparse as js
from benchmarks.workers import peak_bytes, resident_bytes, serve
from benchmarks.workload import NUM_DENSE, RATE
from benchmarks.zipf_log import ZipfLog
from jaxsparse.models import DLRM
from jaxsparse.store.capacity import WAITING_BYTES, moving_bytes, plan_host
from jaxsparse.train.step import train_step

Tier = Literal["device", "ram", "ssd"]
TABLE = "t"
FILLED_AT_A_TIME = 32
"""Batches between looks at how many rows there are."""
SMALL_TABLE: dict[str, Any] = {
    "tier": "device",
    "rows": 1,
    "num_keys": 200_000,
    "exponent": 1.001,
    "passes": 1,
    "steps": 10,
}
"""Of `measure_base`: a batch has about as many different keys as one of the log."""


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
    of an EPYC of 2023; `tier_model.sized` finds others for other machines."""
    steps: int = 300
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
        """Rows the table can have: those it begins with, and those that the steps bring."""
        log = self.log
        begun = log.draws(min(self.rows, 0.99 * self.num_keys))
        # It is filled some batches at a time, and some are read ahead.
        trained = self.num_ids * (self.steps + FILLED_AT_A_TIME + 8 * self.batches_per_pass)
        more = log.distinct(begun + trained) - self.rows
        return self.rows + int(1.1 * max(more, 0)) + 1000

    @property
    def slab_rows(self) -> int:
        """Rows on the device beside other tiers."""
        return int(self.slab_share * self.rows)

    @property
    def log(self) -> ZipfLog:
        """What is trained on."""
        return ZipfLog(num_keys=self.num_keys, exponent=self.exponent)

    def table(self, folder: str = ".") -> js.TableSpec:
        """The table; ``folder`` for its disks."""
        tiers = None
        if self.tier != "device":
            on_disk = {"host_rows": int(self.ram_share * self.rows), "ssd": [folder]}
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
        self.most_bytes = 0
        """Of the batches that were drawn ahead; the most at a time."""
        self._dense = rng.standard_normal((workload.batch, NUM_DENSE), np.float32)
        self._labels = (rng.random(workload.batch) < 0.25).astype(np.float32)

    def draw(self, count: int) -> None:
        """Draws the next ``count`` batches into memory."""
        self._ready.extend(self._next() for _ in range(count))
        keys = sum(sum(part.nbytes for part in one.features.values()) for one in self._ready)
        self.most_bytes = max(self.most_bytes, keys + self._dense.nbytes + self._labels.nbytes)

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

    def __init__(self, workload: TierWorkload, folder: str, base: int = 0) -> None:
        """Makes all but the rows.

        Args:
            workload: what is made.
            folder: for rows on disks.
            base: bytes of this process without what is made here.
        """
        self.base = base
        self.workload = workload
        self.table = workload.table(folder)
        features = [js.FeatureSpec(f"f{n}", self.table) for n in range(workload.features)]
        self.emb = js.EmbeddingCollection(features, mesh=js.make_mesh(devices=jax.devices()[:1]))
        bottom = (*workload.bottom, workload.dim)
        model = DLRM.for_features(features, num_dense=NUM_DENSE, bottom=bottom, top=workload.top)
        self.trainer = js.Trainer(model, self.emb, optimizer=optax.adagrad(RATE))
        self.state = self.trainer.init(jax.random.key(0))
        # Its store reads disks through the page cache.
        assert self.trainer.store is not None
        self.trainer.store.close()
        self.store = js.RowStore(self.emb, self.state.embeddings, direct_io=workload.direct)
        self.batches = KeyedBatches(workload)
        self.passes: list[dict[str, Any]] = []
        self._most_moved = 0
        self._passes: Generator[js.Pass] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What was made."""
        return {
            "path": self.emb.path,
            "jax": jax.__version__,
            "fill_batches": self.batches.number,
            "device_bytes": self._device_bytes(),
            **self._counts(),
        }

    def fill(self) -> None:
        """Rows come to be as in training, but no step is made with them."""
        while self.store.stats()[TABLE]["size"] < self.workload.rows:
            for _ in range(max(1, FILLED_AT_A_TIME // self.workload.batches_per_pass)):
                for _ in self._enter():
                    pass

    def write(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Rows come to be all at once, before the first pass."""
        embeddings = self.store.write(self.state.embeddings, TABLE, keys, rows)
        self.state = dataclasses.replace(self.state, embeddings=embeddings)

    def read(self, keys: np.ndarray) -> np.ndarray:
        """Weights ``[n, D]``; ends the passes."""
        self._end_passes()
        return self.store.read(self.state.embeddings, TABLE, keys)

    def flush(self) -> None:
        """Makes rows on disks durable."""
        self.store.flush(self.state.embeddings)

    def close(self) -> None:
        """Ends the passes and closes the disks."""
        self._end_passes()
        self.store.close()

    def _end_passes(self) -> None:
        if self._passes is not None:
            self._passes.close()
        self._passes = None

    def _enter(self) -> js.Pass:
        if self._passes is None:
            most = self.workload.batches_per_pass
            self._passes = self.store.passes(self.batches, batches_per_pass=most)
        one = next(self._passes)
        embeddings = self.store.enter(self.state.embeddings, one)
        self.state = dataclasses.replace(self.state, embeddings=embeddings)
        moved = max(one.facts["host_to_device_bytes"], one.facts["device_to_host_bytes"])
        self._most_moved = max(self._most_moved, int(moved) // plan_host(self.table).row_bytes)
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
            "stated": {"process": self.base, **self.stated()},
            **self._counts(),
            "pass": means,
        }

    def _device_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))

    def stated(self) -> dict[str, int]:
        """Bytes of memory that can be known, by what takes them; devices are this process's."""
        size = self.store.stats()[TABLE]["size"]
        keys = js.Dynamic(size, admission=self.table.keys.admission)
        # A table that is not full takes less on the host than one that is.
        table = dataclasses.replace(self.table, keys=keys)
        waiting = self.workload.log.distinct(self.batches.number * self.workload.num_ids) - size
        return {
            "model and rows on the device": self._device_bytes(),
            "store": plan_host(table).host_bytes,
            "rows on their way": moving_bytes(table, self._most_moved),
            "keys not admitted": WAITING_BYTES * int(waiting) if keys.admission else 0,
            "log": self.batches.most_bytes,
        }


def measure_base(workload: TierWorkload) -> int:
    """Bytes of a process that trains the same model on a small table, beside that table: the
    interpreter, jax and its programs, what compiling them took, and what a step needs."""
    task = TierTask(dataclasses.replace(workload, **SMALL_TABLE), ".")  # nothing is on a disk
    for number in range(SMALL_TABLE["steps"] // workload.batches_per_pass):
        task.step(number)
    base = peak_bytes() - sum(task.stated().values())
    task.close()
    del task
    gc.collect()
    # What was kept of the small table would be there beside the rows that follow.
    with contextlib.suppress(AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    return base


def prepare(workload: TierWorkload, options: dict[str, Any]) -> TierTask:
    """The task of a workload, filled; option ``folder``, below which rows lie as long as it does,
    by default that of temporary files."""
    files = tempfile.TemporaryDirectory(dir=options.get("folder"))
    task = TierTask(workload, files.name, measure_base(workload))
    weakref.finalize(task, files.cleanup)
    task.fill()
    return task


if __name__ == "__main__":
    serve(prepare, workload=TierWorkload)
