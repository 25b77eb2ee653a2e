# SPDX-License-Identifier: Apache-2.0
"""What is refused before a program is built or run."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxsparse as js

KEY = jax.random.key(0)


def mesh(size: int, names: tuple[str, ...] = ("shard",)) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[:size]).reshape([1] * (len(names) - 1) + [size])
    return jax.sharding.Mesh(devices, names)


def collection(size: int = 2, rows: int = 20, **fields: object) -> js.EmbeddingCollection:
    fields = {"optimizer": js.SGD(1.0), "placement": "sharded", "embedding_dim": 4} | fields
    table = js.TableSpec("t", vocabulary_size=rows, **fields)
    return js.EmbeddingCollection([js.FeatureSpec("f", table)], mesh=mesh(size))


@pytest.mark.parametrize("size", [1, 2])
def test_a_donated_state_is_refused_wherever_it_is_used(size: int) -> None:
    emb = collection(size)
    state = emb.init(KEY)
    ids = emb.pack({"f": np.arange(16)})
    acts, res = emb.lookup(state, ids)
    new = emb.update(state, res, acts, step=0)
    jax.block_until_ready(new)
    text = re.escape("this state was donated to an earlier update; use the one that returned")
    for use in (
        lambda: emb.update(state, res, acts, step=1),
        lambda: emb.lookup(state, ids),
        lambda: emb.read(state, "t", [1]),
        lambda: emb.read_slots(state, "t", [1]),
        lambda: emb.write(state, "t", [1], np.zeros((1, 4))),
    ):
        with pytest.raises(ValueError, match=text):
            use()


@pytest.mark.parametrize(
    "other",
    [
        {"rows": 40},
        {"placement": "single"},
        {"embedding_dim": 5},
        {"optimizer": js.Adagrad(1.0)},
        {"size": 1},
    ],
)
def test_a_state_of_another_collection_is_refused(other: dict[str, object]) -> None:
    emb = collection()
    state = collection(**other).init(KEY)  # type: ignore[arg-type]
    ids = emb.pack({"f": np.arange(4)})
    text = "the state was made by another collection: its tables, placements or mesh differ"
    with pytest.raises(ValueError, match=text):
        emb.lookup(state, ids)
    with pytest.raises(ValueError, match=text):
        emb.read(state, "t", [1])
    with pytest.raises(TypeError, match="expected an EmbeddingState, from init, got dict"):
        emb.lookup({}, ids)  # type: ignore[arg-type]


def test_row_gradients_of_another_collection_are_refused() -> None:
    emb, other = collection(), collection(rows=40)
    acts, res = other.lookup(other.init(KEY), other.pack({"f": [1, 39]}))
    with pytest.raises(ValueError, match=r"rows per device of its slabs are \(10,\), theirs \(20"):
        emb.apply(emb.init(KEY), other.row_grads(res, acts), step=0)
    with pytest.raises(TypeError, match="expected RowGrads, from row_grads, got NoneType"):
        emb.apply(emb.init(KEY), None, step=0)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A user's rule that goes wrong in a way of choice."""

    fault: str
    learning_rate: float = 0.1

    def init_slots(self, num_rows, dim):  # type: ignore[no-untyped-def]
        return {
            "one slot short": {"m": jnp.zeros((num_rows - 1, dim))},
            "half slot": {"m": jnp.zeros((num_rows, dim), jnp.bfloat16)},
            "list": [jnp.zeros((num_rows, dim))],
        }.get(self.fault, {"m": jnp.zeros((num_rows, dim))})

    def update(self, w, slots, g, lr, step):  # type: ignore[no-untyped-def]
        moved, m = w - lr * g, slots["m"] + g
        return {
            "column": (moved[:, :1], {"m": m}),
            "integer": (moved.astype(jnp.int32), {"m": m}),
            "slot lost": (moved, {}),
            "slot more": (moved, {"m": m, "n": m}),
            "only rows": moved,
        }.get(self.fault, (moved, {"m": m}))


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("one slot short", ValueError, "slot 'm' of 7 rows must be [7] or [7, 4], float32 or"),
        ("half slot", ValueError, "got bfloat16[7, 4]"),
        ("list", TypeError, "init_slots must return a dict of arrays"),
        ("column", ValueError, "got {'result[0]': 'float32[5, 1]'"),
        ("integer", ValueError, "got {'result[0]': 'int32[5, 4]'"),
        ("slot lost", ValueError, "update must return (rows, slots) as they came"),
        ("slot more", ValueError, "'result[1]['n']': 'float32[5, 4]'"),
        ("only rows", ValueError, "got {'result': 'float32[5, 4]'}"),
    ],
)
def test_a_rule_that_breaks_its_contract_is_refused(
    fault: str, error: type[Exception], text: str
) -> None:
    owner = "TableSpec 't': optimizer Rule: "
    with pytest.raises(error, match=re.escape(owner)) as caught:
        collection(optimizer=Rule(fault))
    assert text.replace("'", "") in str(caught.value).replace("'", "").replace('"', "")
    collection(optimizer=Rule("none"))


def test_a_rule_that_cannot_be_hashed_is_refused() -> None:
    class Loose(Rule):
        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(TypeError, match="optimizer must be hashable, such as a frozen dataclass"):
        collection(optimizer=Loose("none"))


def test_meshes_keys_and_names() -> None:
    table = js.TableSpec("t", vocabulary_size=4, embedding_dim=2)
    features = [js.FeatureSpec("f", table)]
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh"):
        js.EmbeddingCollection(features, mesh=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mesh axes need names of printable ASCII, got 'α'"):
        js.EmbeddingCollection(features, mesh=mesh(2, ("α",)))
    with pytest.raises(TypeError, match=r"init needs a typed key such as jax\.random\.key"):
        collection().init(0)  # type: ignore[arg-type]
    for name in ("\ud800", "x" * 65):
        with pytest.raises(ValueError, match="must be valid text of at most 64 bytes in UTF-8"):
            js.TableSpec(name, vocabulary_size=4, embedding_dim=2)
    for padding in (True, 0.5, 2**64):
        with pytest.raises(ValueError, match="padding_id must be a 64-bit int, a str or None"):
            js.FeatureSpec("f", table, padding_id=padding)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step", "error", "text"),
    [
        (-1, ValueError, r"step must be in 0\.\.2147483646, got -1"),
        (2**31 - 1, ValueError, r"step must be in 0\.\.2147483646"),
        (1.5, TypeError, "step must be an integer, got 1.5"),
        (jnp.float32(1), TypeError, "step must be an integer, got float32"),
    ],
)
def test_steps_that_are_none(step: object, error: type[Exception], text: str) -> None:
    emb = collection(1)
    state = emb.init(KEY)
    acts, res = emb.lookup(state, emb.pack({"f": [1]}))
    with pytest.raises(error, match=text):
        emb.update(state, res, acts, step=step)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Exploding:
    """Moves rows to NaN where the gradient is not 0."""

    learning_rate: float = 0.1

    def init_slots(self, num_rows, dim):  # type: ignore[no-untyped-def]
        return {"seen": jnp.zeros(num_rows)}

    def update(self, w, slots, g, lr, step):  # type: ignore[no-untyped-def]
        return jnp.where(g != 0, jnp.nan, w), {"seen": slots["seen"] + 1}


class Sum(nnx.Module):
    """The sum of all activations."""

    def __init__(self) -> None:
        self.bias = nnx.Param(jnp.zeros(()))

    def __call__(self, acts, dense, train):  # type: ignore[no-untyped-def]
        return acts["f"].sum(axis=1) + self.bias[...]


@pytest.mark.parametrize("size", [1, 2])
def test_rows_that_a_rule_would_move_to_nan_are_not_written(size: int) -> None:
    emb = collection(size, optimizer=Exploding())
    trainer = js.Trainer(Sum(), emb, optimizer=optax.sgd(0.1))
    state = trainer.init(KEY)
    rows = emb.read(state.embeddings, "t", np.arange(20))
    batch = js.Batch({"f": np.array([3, 3, 5, 1])}, None, np.array([0.0, 1.0, 1.0, 0.0]))
    state, outcome = trainer.step(state, batch)
    assert not bool(outcome["finite"])
    assert int(state.step) == 0
    np.testing.assert_array_equal(emb.read(state.embeddings, "t", np.arange(20)), rows)
    assert not emb.read_slots(state.embeddings, "t", np.arange(20))["seen"].any()


def summing_trainer(**options: object) -> js.Trainer:
    return js.Trainer(Sum(), collection(1), optimizer=optax.sgd(0.1), **options)  # type: ignore[arg-type]


def samples(*labels: float) -> js.Batch:
    return js.Batch({"f": np.arange(len(labels))}, None, np.array(labels, np.float32))


def test_a_label_outside_0_to_1_is_a_bad_sample_for_cross_entropy_only() -> None:
    trainer = summing_trainer()
    state = trainer.init(KEY)
    with pytest.raises(ValueError, match=r"labels is 2\.0 in sample 1 \(1 of 2 samples are bad\)"):
        trainer.step(state, samples(0, 2))
    state, outcome = trainer.step(state, samples(0, 0.25))  # a soft label is one
    assert bool(outcome["finite"])
    regression = summing_trainer(loss=optax.squared_error)
    assert bool(regression.step(regression.init(KEY), samples(0, 2))[1]["finite"])


def test_a_donated_train_state_is_refused() -> None:
    trainer = summing_trainer()
    state = trainer.init(KEY)
    jax.block_until_ready(trainer.step(state, samples(0, 1)))
    text = "this state was donated to an earlier update"
    for use in (
        lambda: trainer.step(state, samples(0, 1)),
        lambda: trainer.evaluate(state, [samples(0, 1)]),
        lambda: trainer.predict(state, [samples(0, 1)]),
        lambda: trainer.fit([samples(0, 1)], epochs=1, state=state, progress=False),
    ):
        with pytest.raises(ValueError, match=text):
            use()


def test_what_stops_fit_carries_the_last_good_state() -> None:
    trainer = summing_trainer()
    with pytest.raises(ValueError, match="labels is nan in sample 0") as caught:
        trainer.fit([samples(0, 1), samples(np.nan)], epochs=1, progress=False)
    state = caught.value.train_state  # type: ignore[attr-defined]
    assert int(state.step) == 1
    assert caught.value.__notes__ == ["the state before the step that failed is error.train_state"]
    assert trainer.evaluate(state, [samples(0, 1)])["num_samples"] == 2


@pytest.mark.parametrize(("steps", "text"), [(1.5, "got 1.5"), (-3, "got -3")])
def test_steps_of_fit(steps: object, text: str) -> None:
    with pytest.raises(ValueError, match=f"fit: steps must be a global step, an int >= 0, {text}"):
        summing_trainer().fit([], steps=steps)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Plain:
    """A rule without a learning rate of its own."""

    def init_slots(self, num_rows, dim):  # type: ignore[no-untyped-def]
        return {}

    def update(self, w, slots, g, lr, step):  # type: ignore[no-untyped-def]
        return w - 0.5 * lr * g, slots


def test_a_rule_without_a_learning_rate_is_given_1() -> None:
    emb = collection(1, optimizer=Plain())
    state = emb.init(KEY)
    before = emb.read(state, "t", [3])
    acts, res = emb.lookup(state, emb.pack({"f": [3]}))
    state = emb.update(state, res, {"f": jnp.ones_like(acts["f"])})
    np.testing.assert_array_equal(emb.read(state, "t", [3]), before - np.float32(0.5))
