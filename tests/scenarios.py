# SPDX-License-Identifier: Apache-2.0
"""What processes of a job do in tests: functions of the mesh and of which process this is.

The same function run with ``(mesh, 0, 1)`` is the job on one process: results are to be equal.
"""

from __future__ import annotations

import os
import pathlib
import signal
import tempfile
from functools import partial

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

import jaxsparse as js
from jaxsparse import distributed, processes
from jaxsparse.data import BatchShare
from jaxsparse.processes import local_block, local_devices, put_blocks

ROWS = {"item": 97, "word": 40, "shop": 9}


def error_of(call):
    try:
        call()
    except (ValueError, RuntimeError, TypeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# ---- the embedding layer ----------------------------------------------------------------------


def collection(mesh):
    """Three slabs; every row of them is written before it is used, so none has to be drawn."""
    table = partial(js.TableSpec, initializer=js.constant(0.0))
    item = table("item", vocabulary_size=97, embedding_dim=4, optimizer=js.Adagrad(0.25, eps=0))
    word = table(
        "word", vocabulary_size=40, embedding_dim=2, optimizer=js.SGD(0.5), placement="replicated"
    )
    shop = table(
        "shop", vocabulary_size=9, embedding_dim=4, optimizer=js.Adagrad(0.25), placement="single"
    )
    features = [
        js.FeatureSpec("item", item),
        js.FeatureSpec("seen", item),
        js.FeatureSpec("padded", item, combiner=None, max_length=3, padding_id=0),
        js.FeatureSpec("words", word),
        js.FeatureSpec("shop", shop),
        js.FeatureSpec("shops", shop),
    ]
    return js.EmbeddingCollection(features, mesh=mesh)


def samples(rng, count):
    """Dyadic everything: float32 sums are exact in any order."""

    def bags(rows, weighted):
        lengths = rng.integers(0, 5, count)
        total = int(lengths.sum())
        weights = (rng.integers(-64, 65, total) / 64).astype(np.float32) if weighted else None
        return js.Ragged.from_lengths(rng.integers(0, rows, total), lengths, weights)

    features = {
        "item": rng.integers(0, 97, count),
        "seen": bags(97, weighted=True),
        "padded": rng.integers(0, 97, (count, 3)),
        "words": bags(40, weighted=False),
        "shop": rng.integers(0, 9, (count, 2)),
        "shops": bags(9, weighted=True),
    }
    shapes = {"item": (4,), "seen": (4,), "padded": (3, 4), "words": (2,), "shop": (4,)}
    grads = {
        name: (rng.integers(-64, 65, (count, *shape)) / 64).astype(np.float32)
        for name, shape in {**shapes, "shops": (4,)}.items()
    }
    return features, grads


SHARES = ((4, 4), (4, 3), (3, 0), (0, 1), (5, 2), (0, 0))
"""Samples of each of two processes, step by step."""

ALL_STEPS = range(len(SHARES))


def my_part(columns, step, index, count):
    """This process's samples of a step; all of them for a process on its own."""
    start, stop = (0, sum(SHARES[step])) if count == 1 else (0, SHARES[step][0])
    if index == 1:
        start, stop = SHARES[step][0], sum(SHARES[step])

    def cut(column):
        return column.slice(start, stop) if isinstance(column, js.Ragged) else column[start:stop]

    return {name: cut(column) for name, column in columns.items()}, stop - start


def exactness(mesh, index, count, steps=ALL_STEPS):
    """Several steps of lookup and update with uneven and empty shares."""
    emb = collection(mesh)
    state = emb.init(jax.random.key(3))
    rng = np.random.default_rng(5)
    for name, rows in ROWS.items():
        values = rng.integers(-64, 65, (rows, emb.tables[name].embedding_dim)) / 64
        state = emb.write(state, name, np.arange(rows), values)
    told = {"acts": [], "weight_grads": [], "lengths": [], "shapes": []}
    for step in steps:
        features, grads = samples(rng, sum(SHARES[step]))
        features, num_samples = my_part(features, step, index, count)
        grads, _ = my_part(grads, step, index, count)
        ids = emb.pack(features)
        assert ids.num_samples == num_samples
        acts, residuals = emb.lookup(state, ids)
        grads = on_mesh(emb, grads, ids)
        told["acts"].append({k: local_block(v)[:num_samples] for k, v in acts.items()})
        told["lengths"].append(local_block(ids.lengths("seen"))[:num_samples])
        weight_grads = emb.weight_grads(residuals, grads)
        told["weight_grads"].append({k: np.asarray(v) for k, v in weight_grads.items()})
        told["shapes"].append((ids.padded_samples, ids.rung, ids.need))
        state = emb.update(state, residuals, grads, step=step)
    told["rows"] = {name: emb.read(state, name, np.arange(rows)) for name, rows in ROWS.items()}
    told["slots"] = {
        name: emb.read_slots(state, name, np.arange(rows)) for name, rows in ROWS.items()
    }
    return told


def on_mesh(emb, grads, ids):
    devices = local_devices(emb.mesh)
    size = ids.padded_samples // emb.num_shards * (devices.stop - devices.start)
    padded = {
        k: np.pad(g, [(0, size - len(g)), *[(0, 0)] * (g.ndim - 1)]) for k, g in grads.items()
    }
    return put_blocks(padded, emb.mesh, dict.fromkeys(padded, PartitionSpec(emb.axes)))


def layer_errors(mesh, index, count):
    """What only several processes can do wrong."""
    emb = collection(mesh)
    state = emb.init(jax.random.key(3))
    features, grads = samples(np.random.default_rng(index), 4)
    ids = emb.pack(features)
    _, residuals = emb.lookup(state, ids)
    grads = on_mesh(emb, grads, ids)
    other = {**features, "item": np.stack([features["item"]] * (1 + index), axis=1)}
    devices = mesh.devices.ravel()
    own = collection(js.make_mesh(devices=jax.local_devices()))
    swapped = js.make_mesh(devices=[devices[i] for i in (0, 2, 1, 3)])
    theirs = js.make_mesh(devices=[d for d in devices if d.process_index != index])
    return {
        "in jit": error_of(lambda: jax.jit(emb.weight_grads)(residuals, grads)),
        "form": error_of(lambda: emb.pack(other)),
        "key": error_of(lambda: emb.pack({**features, "item": features["item"] + 97 * index})),
        "order": error_of(lambda: collection(swapped).pack(features)),
        "absent": error_of(lambda: collection(theirs).pack(features)),
        # A mesh of one process asks nobody.
        "own mesh": own.pack(features).padded_samples if index else None,
        "rung": error_of(lambda: emb.pack(features, rung=1)),
    }


def numbers(mesh, index, count):
    """What is gathered and agreed: strange values, sizes that differ."""
    value = {"index": index, "pi": np.float64(np.pi) * (index + 1), "big": 2**40 + index}
    value["array"] = np.arange(1000 * index, dtype=np.int64) + 2**40
    distributed.check_collectives(mesh)
    return {
        "gathered": processes.gather(mesh, value),
        "maximum": processes.maximum(mesh, [index, -index, 7]),
        "shared": processes.is_shared(mesh),
        "told": (distributed.is_first(), distributed.initialize() is not None),
    }


# ---- the trainer ------------------------------------------------------------------------------


class Net(nnx.Module):
    """A small tower over two activations and the dense columns."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.hidden = nnx.Linear(12, 8, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, acts, dense, train):
        inputs = jax.numpy.concatenate([acts["user"], acts["seen"], dense], axis=1)
        return self.out(jax.nn.relu(self.hidden(inputs)))[:, 0]


def click_trainer(mesh, seed=0, **options):
    user = js.TableSpec("user", vocabulary_size=200, embedding_dim=4)
    item = js.TableSpec("item", vocabulary_size=50, embedding_dim=4, placement="replicated")
    features = [js.FeatureSpec("user", user), js.FeatureSpec("seen", item, combiner="mean")]
    emb = js.EmbeddingCollection(features, mesh=mesh)
    return js.Trainer(Net(seed), emb, optimizer=optax.adam(1e-2), **options)


def click_batches(num_batches, batch_size, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(num_batches):
        user = rng.integers(0, 200, batch_size)
        lengths = rng.integers(0, 6, batch_size)
        seen = js.Ragged.from_lengths(rng.integers(0, 50, int(lengths.sum())), lengths)
        dense = rng.normal(size=(batch_size, 4))
        chance = 1 / (1 + np.exp(-dense[:, 0] - (user % 3 - 1)))
        labels = (rng.random(batch_size) < chance).astype(np.float32)
        weights = rng.integers(1, 4, batch_size).astype(np.float32)
        made.append(js.Batch({"user": user, "seen": seen}, dense, labels, weights))
    return made


def share(batches, index, count):
    """Every batch's contiguous part of this process."""
    return [
        b.slice(b.num_samples * index // count, b.num_samples * (index + 1) // count)
        for b in batches
    ]


def curves(mesh, index, count):
    """Loss by step, metrics and predictions of one job."""
    trainer = click_trainer(mesh)
    data = share(click_batches(20, 32), index, count)
    judged = share(click_batches(3, 50, seed=9), index, count)
    result = trainer.fit(
        data, steps=20, eval_dataset=judged, eval_every=10, log_every=1, progress=False
    )
    return {
        "loss": [row["loss"] for row in result.history if row["kind"] == "train"],
        "auc": [row["auc"] for row in result.history if row["kind"] == "train"],
        "samples": [row["num_samples"] for row in result.history if row["kind"] == "train"],
        "eval": trainer.evaluate(result.state, judged),
        "predictions": trainer.predict(result.state, judged),
        "labels": np.concatenate([b.labels for b in judged]),
        "weights": np.concatenate([b.weights for b in judged]),
    }


class Sum(nnx.Module):
    """The activation itself: its gradient is the loss's."""

    def __init__(self):
        self.zero = nnx.Param(jax.numpy.zeros(()))

    def __call__(self, acts, dense, train):
        return acts["id"][:, 0]


def linear(logits, labels):
    return logits + 0 * labels


def counter(mesh, **options):
    """A trainer whose rows count: one occurrence in a step of weight W moves a row by -1/W."""
    table = js.TableSpec(
        "id",
        vocabulary_size=64,
        embedding_dim=1,
        optimizer=js.SGD(1.0),
        initializer=js.constant(0.0),
    )
    emb = js.EmbeddingCollection([js.FeatureSpec("id", table)], mesh=mesh)
    return js.Trainer(Sum(), emb, optimizer=optax.sgd(0.0), loss=linear, **options)


def id_batches(ids, size=4):
    return [
        js.Batch({"id": ids[i : i + size]}, labels=np.zeros(len(ids[i : i + size])))
        for i in range(0, len(ids), size)
    ]


def moved(trainer, state):
    return trainer.emb.read(state.embeddings, "id", np.arange(64))[:, 0]


def uneven(mesh, index, count):
    """Five batches here, three there, two epochs; then one process without any data."""
    shares = [np.arange(20), np.arange(20, 32)]
    trainer = counter(mesh)
    result = trainer.fit(id_batches(shares[index]), epochs=2, log_every=1, progress=False)
    told = {
        "rows": moved(trainer, result.state),
        "steps": int(result.state.step),
        "samples": sum(row["num_samples"] for row in result.history),
    }
    trainer = counter(mesh)
    alone = [np.array([], np.int64), np.array([40, 41, 42])][index]
    result = trainer.fit(id_batches(alone), epochs=2, log_every=1, progress=False)
    told["alone"] = moved(trainer, result.state)
    told["alone eval"] = trainer.evaluate(result.state, id_batches(alone))
    told["alone predict"] = trainer.predict(result.state, id_batches(alone))
    told["nothing"] = error_of(lambda: trainer.evaluate(result.state, []))
    told["no step"] = error_of(lambda: trainer.fit([], epochs=1, progress=False))
    return told


def buckets(mesh, index, count):
    """Bags of 8 ids here, of 32 there: one program, exact sums."""
    table = js.TableSpec(
        "t", vocabulary_size=64, embedding_dim=1, optimizer=js.SGD(1.0), dtype="float32"
    )
    emb = js.EmbeddingCollection([js.FeatureSpec("f", table)], mesh=mesh)
    state = emb.init(jax.random.key(0))
    state = emb.write(state, "t", np.arange(64), np.arange(64)[:, None])
    lengths = {0: [8, 8], 1: [32, 32]}
    mine = lengths[index] if count > 1 else lengths[0] + lengths[1]
    bags = [np.arange(n) for n in mine]
    ids = emb.pack({"f": js.Ragged.from_lists(bags)})
    acts, _ = emb.lookup(state, ids)
    buffer = ids.slabs[0].inverse.shape[0] // emb.num_shards
    return {
        "sums": local_block(acts["f"])[: len(mine), 0].tolist(),
        "buffer": buffer,
        "needed": max(map(len, bags)),
    }


def together(mesh, index, count):
    """Errors, stops and skips of one process are those of all."""
    told = {}
    trainer = counter(mesh)
    good = id_batches(np.arange(12))
    bad = js.Batch({"id": np.array([1, 99])}, labels=np.zeros(2))
    state = trainer.init(jax.random.key(0))
    state, _ = trainer.step(state, good[0])
    told["bad key"] = error_of(lambda: trainer.step(state, bad if index == 1 else good[1]))
    nan = js.Batch({"id": np.array([1])}, labels=np.array([np.nan]))
    told["bad sample"] = error_of(lambda: trainer.step(state, nan if index == 0 else good[1]))
    told["after errors"] = (int(state.step), moved(trainer, state)[:4].tolist())

    def fails_at_third():
        yield from good[:2]
        if index == 1:
            raise ValueError("the file ends in the middle of a row")
        yield good[2]

    class Failing:
        def __iter__(self):
            return fails_at_third()

    told["dataset"] = error_of(lambda: trainer.fit(Failing(), epochs=1, progress=False))
    tasks = {"a": np.zeros(4), "b": np.zeros(4)} if index else np.zeros(4)
    other = js.Batch({"id": np.arange(4)}, labels=tasks)
    told["form"] = error_of(lambda: trainer.step(state, other))
    told["model"] = error_of(lambda: click_trainer(mesh, seed=index).init(jax.random.key(0)))

    # One process asks to stop, at its own third step; all stop at one step.
    def stops(event):
        return index == 1 and event.step == 3

    result = trainer.fit(good, steps=9, log_every=1, callbacks=[stops], progress=False)
    told["callback stop"] = int(result.state.step)
    skipping = counter(mesh, on_bad_sample="skip")
    state = skipping.init(jax.random.key(0))
    half = js.Batch({"id": np.array([5])}, labels=np.array([np.nan])) if index else good[0]
    state, outcome = skipping.step(state, half)
    told["skip here"] = (int(state.step), moved(skipping, state)[:6].tolist())
    state, outcome = skipping.step(state, nan)
    told["skip all"] = (int(state.step), outcome)
    return told


def requested_stop(mesh, index, count):
    """A request of one process, from any thread, ends all at one step."""
    trainer = counter(mesh)

    class Asks:
        def __iter__(self):
            for number, batch in enumerate(id_batches(np.arange(40))):
                if number == 4 and index == 1:
                    trainer.request_stop()
                yield batch

    # Without drawing ahead, which would ask before the steps of the batches drawn so far.
    result = trainer.fit(Asks(), epochs=3, log_every=100, progress=False, prefetch=0)
    return int(result.state.step)


def files(mesh, index, count):
    """Only process 0 writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "metrics.jsonl"
        data = id_batches(np.arange(8))
        counter(mesh).fit(data, epochs=1, metrics_path=path, progress=False, log_every=1)
        return path.exists()


# ---- a process that dies ----------------------------------------------------------------------

MOMENTS = ("import", "join", "init", "step", "evaluate")
"""Before the job is joined, right after, when the state is there, in a step, in an evaluation."""


def dies_at(moment):
    """Kills this process if the environment says so: ``JOB_KILL=process:moment``."""
    if os.environ.get("JOB_KILL") == f"{os.environ['JAXSPARSE_PROCESS_ID']}:{moment}":
        os.kill(os.getpid(), signal.SIGKILL)


class Deadly(list):
    """Batches, at one of which, counted over all passes, the process may die."""

    def __init__(self, moment, at, batches):
        super().__init__(batches)
        self.moment, self.at, self.drawn = moment, at, 0

    def __iter__(self):
        for batch in super().__iter__():
            self.drawn += 1
            if self.drawn == self.at:
                dies_at(self.moment)
            yield batch


def mortal(mesh, index, count):
    """A training that would not end for long, unless a process dies."""
    dies_at("join")
    trainer = counter(mesh)
    state = trainer.init(jax.random.key(0))
    dies_at("init")
    # The hundredth batch is drawn when more than ninety steps were made.
    data, judged = (
        Deadly(moment, at, id_batches(np.arange(24)))
        for moment, at in (("step", 100), ("evaluate", 3))
    )
    trainer.fit(data, steps=10**6, state=state, eval_dataset=judged, eval_every=10)


# ---- checkpoints ------------------------------------------------------------------------------


def saves(mesh, index, count):
    """Loads what other meshes saved, goes on with ``one``, and makes half of a run in ``two``."""
    from tests.ckpt import runs

    folder = pathlib.Path(os.environ["JAXSPARSE_TEST_FOLDER"])
    trainer = runs.make_trainer(mesh=mesh, plain=True)

    def train(name, steps, **options):
        data = BatchShare(runs.train_data().dataset, index, count)
        manager = js.CheckpointManager(folder / name, every=3)
        result = trainer.fit(
            data, steps=steps, log_every=3, checkpoint=manager, progress=False, **options
        )
        users = np.arange(runs.USERS)
        rows = trainer.emb.read(result.state.embeddings, "user", users)
        slots = trainer.emb.read_slots(result.state.embeddings, "user", users)
        return result.history, rows, slots

    half = train("two", 6)
    batch = next(iter(BatchShare(runs.train_data().dataset, index, count)))
    loaded = {
        name: runs.loaded(trainer, folder / name, batch)
        for name in ("saved-1", "one", "saved-8", "two")
    }
    resumed = train("one", 10, resume="must")
    refused = error_of(lambda: train("two", 7, resume="never"))
    other = os.environ.get("JAXSPARSE_TEST_IN_THE_WAY")
    failed = ""
    if other and index == 0:
        (folder / other).write_text("in the way")
    if other:
        failed = error_of(lambda: train("two", 9))
        if index == 0:
            (folder / other).unlink()
    return resumed, half, refused, failed, loaded


# ---- row stores -------------------------------------------------------------------------------


def row_stores(mesh, index, count):
    """All of `tests.store.shared_jobs`."""
    from tests.store import shared_jobs

    parts = ("tiers", "policies", "trouble", "fit")
    return {part: getattr(shared_jobs, part)(mesh, index, count) for part in parts}
