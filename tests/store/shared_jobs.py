# SPDX-License-Identifier: Apache-2.0
"""What processes that share a row store do in tests: functions of the mesh and of who this is.

Run with ``(mesh, 0, 1)`` each is the same job on one process: results are to be equal.
"""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import tempfile

import jax
import numpy as np
import optax
from flax import nnx

import jaxsparse as js
from jaxsparse.processes import gather, local_block
from jaxsparse.store.ssd import StoreError
from tests.scenarios import error_of, linear, on_mesh, share
from tests.store import test_row_store
from tests.store.stores import Stored, batch_of, dynamic, look, train


class SharedStore(Stored):
    """Trains this process's part of batches and gradients that every process has whole."""

    def __init__(self, features, mesh, index, count, seed=0):
        self.index, self.count = index, count
        super().__init__(features, mesh, seed)

    def train(self, batches, grads=None, **options):
        results, facts = [], []
        for p in self.store.passes(self.share(batches), **options):
            self.state = self.store.enter(self.state, p)
            for samples, packed in p.with_batches():
                whole = {} if grads is None else grads[self.steps]
                mine = on_mesh(self.emb, self._grads(samples.num_samples, whole), packed.ids)
                step = np.int32(self.steps)
                acts, self.state = train(self.emb, self.state, packed.ids, mine, step)
                results.append(self._mine(acts, packed))
                self.steps += 1
            facts.append(p.facts)
        return results, facts

    def evaluate(self, batches, **options):
        results = []
        for p in self.store.passes(self.share(batches), train=False, **options):
            self.state = self.store.enter(self.state, p)
            results += [self._mine(look(self.emb, self.state, b.ids), b) for b in p]
        return results

    def share(self, batches):
        return share([batch_of(batch) for batch in batches], self.index, self.count)

    def _mine(self, acts, packed):
        return {name: local_block(act)[: packed.num_samples] for name, act in acts.items()}

    def _grads(self, num_samples, whole):
        full = {}
        for spec in self.emb.features:
            bag = () if spec.combiner else (spec.max_length,)
            full[spec.name] = np.ones((num_samples, *bag, spec.table.embedding_dim), np.float32)
            if spec.name in whole:
                size = len(whole[spec.name])
                start, stop = (size * k // self.count for k in (self.index, self.index + 1))
                full[spec.name] = whole[spec.name][start:stop]
        return full


@contextlib.contextmanager
def common_folder(mesh, index):
    """One folder for all processes."""
    made = tempfile.mkdtemp() if index == 0 else ""
    folder = pathlib.Path(gather(mesh, made)[0])
    try:
        yield folder
    finally:
        gather(mesh, "done")
        if index == 0:
            shutil.rmtree(folder)


STEPS = {"device": 200, "ram": 60, "ssd": 200}
"""By set-up. Where only memory is behind the devices few are enough: with disks it is there too."""


def tiers(mesh, index, count):
    """Steps on all three set-ups."""
    told = {}
    with common_folder(mesh, index) as folder:
        for setup in test_row_store.SETUPS:
            features = test_row_store.features_of(setup, folder)
            batches, grads = (part[: STEPS[setup]] for part in test_row_store.log())
            with SharedStore(features, mesh, index, count) as stored:
                initial = stored.read(test_row_store.all_keys())
                acts, facts = stored.train(batches, grads)
                stored.store.flush(stored.state)
                keys = stored.store.keys("t")
                told[setup] = {
                    "initial": initial,
                    "keys": keys,
                    "rows": stored.read(keys),
                    "slots": stored.slots(keys),
                    "acts": acts,
                    "stats": stored.store.stats()["t"],
                    "moved": sum(f["host_to_device_bytes"] for f in facts),
                    "census": stored.store.census("t"),
                    "folders": sorted(
                        str(path.relative_to(folder)) for path in folder.glob("a/*/t")
                    ),
                }
    return told


POLICIES = {
    "count": {"admission": js.CountAdmission(2)},
    "bloom": {"admission": js.BloomAdmission(2, bytes=64)},
    "coin": {"admission": js.ProbabilityAdmission(0.3)},
    "lru": {"capacity": 40, "eviction": js.LRU(), "tiers": js.Tiers(device_rows=32)},
    "lfu": {"capacity": 40, "eviction": js.LFU(), "placement": "replicated"},
    "ttl": {"eviction": js.TTL(steps=3)},
    "hours": {"capacity": 60, "eviction": js.TTL(seconds=4.0), "placement": "single"},
    "norm": {"capacity": 40, "eviction": js.L2Norm(below=0.4)},
}
NUM_STEPS = 60


def policy_batches():
    """12 samples a step of every table; the time of a batch is its label."""
    rng = np.random.default_rng(8)
    made = []
    for step in range(NUM_STEPS):
        keys = {name: (90 ** rng.random(12)).astype(np.int64) - 1 for name in POLICIES}
        keys["norm"] = keys["norm"] % 30 + step // 20 * 4
        made.append(js.Batch(keys, labels=np.full(12, float(step))))
    return made


def policies(mesh, index, count):
    """Admission and eviction of every kind, in one collection."""
    features = [
        js.FeatureSpec(name, dynamic(name, **{"capacity": 200, **keys}, optimizer=js.Adagrad(0.1)))
        for name, keys in POLICIES.items()
    ]
    told = {}
    batches = policy_batches()
    with SharedStore(features, mesh, index, count) as stored:
        options = {"time": lambda batch: batch.labels[0], "batches_per_pass": 2}
        told["first"] = stored.train(batches[:30], **options)[0]
        told["evicted"] = {name: stored.store.evict(name, np.arange(5)) for name in POLICIES}
        for name in POLICIES:
            rows = np.arange(6, dtype=np.float32).reshape(3, 2)
            stored.state = stored.store.write(stored.state, name, [2, 70, 3], rows)
        before = contents(stored)
        told["evaluated"] = stored.evaluate(batches[30:34])
        told["unchanged"] = str(contents(stored)) == str(before)
        told["second"] = stored.train(batches[30:], **options)[0]
        told["contents"] = contents(stored)
        told["unknown"] = {name: stored.read([10**6, 1], name) for name in POLICIES}
    return told


COUNTED = ("size", "lookups", "inserts", "evictions", "admissions_refused")


def contents(stored):
    told = {}
    for name in stored.emb.stored_tables:
        keys, stats = stored.store.keys(name), stored.store.stats()[name]
        known = stored.store._tables[name].known
        numbers = known.index.find(keys)
        told[name] = {
            "keys": keys,
            "numbers": numbers,
            "counts": known.counters.count[numbers],
            "last": known.counters.last[numbers],
            "hotness": known.hotness.of(numbers),
            "rows": stored.read(keys, name),
            "slots": stored.slots(keys, name),
            "counted": {what: stats[what] for what in COUNTED},
        }
    return told


def counting(capacity=64, **keys):
    """A table whose rows count: one occurrence moves a row by -1."""
    return dynamic("t", capacity, 1, initializer=js.constant(0.0), **keys)


def trouble(mesh, index, count):
    """What one process has or meets, and the other has not."""
    told = {}
    features = [js.FeatureSpec("f", counting())]

    def batch(*keys):
        return batch_of({"f": np.array(keys, np.int64)})

    class Uneven(SharedStore):
        def share(self, batches):
            return batches

    with Uneven(features, mesh, index, count) as stored:
        shares = [[batch(1, 2), batch(1), batch(3, 3, 4), batch(5)], [batch(1, 9)]]
        acts, _ = stored.train(shares[index], batches_per_pass=3)
        told["uneven"] = [len(act["f"]) for act in acts]
        none = [[], [batch(7)]]
        stored.train(none[index])
        told["counts"] = dict(zip(stored.keys(), stored.read(stored.keys())[:, 0], strict=True))
        told["looked"] = stored.evaluate([[batch(1)], [batch(3, 7), batch(8)]][index])

        def broken():
            yield batch(1)
            if index == 1:
                raise ValueError("the file ends in the middle of a row")
            yield batch(2)

        told["dataset"] = error_of(lambda: stored.train(broken()))
        bad = js.Batch({"f": np.array([0.5])}, labels=np.zeros(1))
        told["bad batch"] = error_of(lambda: stored.train([bad if index == 0 else batch(1)]))
        told["full"] = error_of(
            lambda: stored.train([batch(*range(100 + 40 * index, 140 + 40 * index))])
        )
        told["after errors"] = stored.read([1, 3])[:, 0].tolist()
        told["contents"] = error_of(lambda: stored.store.contents(stored.state))
        told["refill"] = error_of(lambda: stored.store.refill(stored.state, {}, None))
    table = counting(tiers=js.Tiers(device_rows=8))
    with Uneven([js.FeatureSpec("f", table)], mesh, index, count) as stored:
        host = stored.store._tables["t"].host
        start = host.start

        def fails(rows, *others):
            if index == 1:
                raise StoreError("the disk is gone")
            return start(rows, *others)

        batches = [batch(k, k + 1) for k in (0, 4, 8, 12)]
        stored.train(batches)
        # All of process 1, which has four places.
        told["places"] = error_of(lambda: stored.train([batch(41, 42, 43, 48, 49)]))
        host.start = fails
        told["disk"] = error_of(lambda: stored.train(batches))
        told["read"] = error_of(lambda: stored.read(range(16)))
        host.start = start
        told["after disk"] = stored.read(range(16))[:, 0].tolist()
    with common_folder(mesh, index) as folder:
        table = counting(tiers=js.Tiers(device_rows=8, ssd=[folder]))
        if index == 1:
            (folder / "process-1").write_text("in the way")
        told["folder"] = error_of(lambda: SharedStore([js.FeatureSpec("f", table)], mesh, 0, 1))
    return told


class Sum(nnx.Module):
    """The sum of all activations: gradients are the loss's, and exact in any order."""

    def __init__(self):
        self.zero = nnx.Param(jax.numpy.zeros(()))

    def __call__(self, acts, dense, train):
        return acts["user"].sum(axis=1) + acts["seen"].sum(axis=1)


def make_trainer(mesh):
    zeros = js.constant(0.0)
    user = dynamic("user", 400, 2, js.SGD(0.5), js.Tiers(device_rows=160), initializer=zeros)
    item = js.TableSpec(
        "item", vocabulary_size=50, embedding_dim=2, optimizer=js.SGD(0.5), initializer=zeros
    )
    features = [js.FeatureSpec("user", user), js.FeatureSpec("seen", item)]
    emb = js.EmbeddingCollection(features, mesh=mesh)
    return js.Trainer(Sum(), emb, optimizer=optax.sgd(0.0), loss=linear)


def fit_batches(num_batches, seed):
    rng = np.random.default_rng(seed)
    return [
        js.Batch(
            {"user": rng.integers(0, 300, 32), "seen": rng.integers(0, 50, (32, 2))},
            labels=rng.integers(0, 2, 32).astype(np.float32),
        )
        for _ in range(num_batches)
    ]


def fit(mesh, index, count):
    """Training with evaluations, and what ends it."""
    told = {}
    trainer = make_trainer(mesh)
    data = share(fit_batches(12, 0), index, count)
    judged = share(fit_batches(2, 9), index, count)
    result = trainer.fit(
        data, epochs=2, eval_dataset=judged, eval_every=10, log_every=1, progress=False
    )
    rows = [row for row in result.history if row["kind"] == "train"]
    told["history"] = [[row[name] for name in ("step", "loss", "auc")] for row in rows]
    told["evals"] = [
        [row[name] for name in ("step", "loss", "auc")]
        for row in result.history
        if row["kind"] == "eval"
    ]
    told["eval"] = trainer.evaluate(result.state, judged)
    told["predictions"] = trainer.predict(result.state, judged)
    keys = trainer.store.keys("user")
    told["keys"], told["rows"] = keys, trainer.store.read(result.state.embeddings, "user", keys)
    state, outcome = trainer.step(result.state, data[0])
    told["step"] = float(outcome["loss"])
    if count > 1:
        told |= ends(trainer, state, data, judged, index)
    trainer.store.close()
    return told


def ends(trainer, state, data, judged, index):
    """Uneven data, a request to stop, bad samples, a save."""
    told = {"samples": trainer.evaluate(state, judged[: 2 - index])["num_samples"]}
    first = int(state.step)
    result = trainer.fit(data[: 5 - 3 * index], epochs=1, state=state, progress=False)
    before = int(result.state.step)
    told["steps"] = before - first

    class Asks(list):
        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                if number == 4 and index == 1:
                    trainer.request_stop()
                yield batch

    asked = trainer.fit(
        Asks(data), epochs=50, state=result.state, batches_per_pass=1, progress=False
    )
    told["stopped"] = int(asked.state.step) - before
    state, bad = asked.state, data[0]
    if index == 0:
        bad = js.Batch(bad.features, labels=np.full(bad.num_samples, np.nan))
    told["bad step"] = error_of(lambda: trainer.step(state, bad))
    told["bad eval"] = error_of(lambda: trainer.evaluate(state, [bad]))
    manager = js.CheckpointManager(pathlib.Path(tempfile.gettempdir()) / "never", every=3)
    told["saved"] = error_of(lambda: trainer.fit(data, steps=3, checkpoint=manager, progress=False))
    return told
