# SPDX-License-Identifier: Apache-2.0
"""What a collection refuses: each message names the feature, the value and what to do."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.addressing import Addressing
from jaxsparse.layout import TableBlock

ITEM = js.TableSpec("item", vocabulary_size=10, embedding_dim=4, placement="sharded")
FEATURES = [
    js.FeatureSpec("shown", ITEM),
    js.FeatureSpec("clicked", ITEM, combiner="mean", max_length=3),
]


@pytest.fixture(scope="module")
def emb():
    return js.EmbeddingCollection(FEATURES, mesh=js.make_mesh(devices=jax.devices()[:2]))


@pytest.fixture(scope="module")
def state(emb):
    return emb.init(jax.random.key(0))


def batch(**features):
    return {"shown": np.array([1, 2]), "clicked": js.Ragged.from_lists([[1, 2], []]), **features}


# ---- the collection itself --------------------------------------------------------------------

MESH = js.make_mesh(devices=jax.devices()[:1])


def test_no_features():
    with pytest.raises(ValueError, match="features is empty, expected at least one"):
        js.EmbeddingCollection([], mesh=MESH)


def test_feature_named_twice():
    with pytest.raises(ValueError, match=r"feature names must be unique, twice: \['shown'\]"):
        js.EmbeddingCollection([FEATURES[0], FEATURES[0]], mesh=MESH)


@pytest.mark.parametrize(
    "fields",
    [{"vocabulary_size": 11}, {"optimizer": js.SGD(0.05)}, {"optimizer": js.Adagrad(0.06)}],
    ids=str,
)
def test_two_tables_of_one_name(fields):
    other = js.TableSpec("item", **{"vocabulary_size": 10, "embedding_dim": 4, **fields})
    with pytest.raises(ValueError, match="two different tables are named 'item'"):
        js.EmbeddingCollection([FEATURES[0], js.FeatureSpec("x", other)], mesh=MESH)


# ---- pack -------------------------------------------------------------------------------------

PACK_ERRORS = {
    "missing": (
        {"shown": np.array([1])},
        ValueError,
        "features do not match the collection: missing ['clicked'], unknown []; "
        "expected exactly ['shown', 'clicked']",
    ),
    "unknown": (batch(extra=np.array([1, 2])), ValueError, "missing [], unknown ['extra']"),
    "sizes": (
        batch(shown=np.array([1, 2, 3])),
        ValueError,
        "features must have equally many samples, got {'shown': 3, 'clicked': 2}",
    ),
    "rank 0": (
        batch(shown=np.array(1)),
        ValueError,
        "feature 'shown': expected keys [B], [B, L] or a Ragged, got an array of shape ()",
    ),
    "rank 3": (
        batch(shown=np.zeros((2, 1, 1), int)),
        ValueError,
        "feature 'shown': expected keys [B], [B, L] or a Ragged, got an array of shape (2, 1, 1)",
    ),
    "key too large": (
        batch(shown=np.array([1, 17])),
        ValueError,
        "feature 'shown': key 17 at position 1 is outside 0..9",
    ),
    "negative key": (
        batch(clicked=js.Ragged.from_lists([[1], [-1]])),
        ValueError,
        "feature 'clicked': key -1 at position 1 is outside 0..9",
    ),
    "float keys": (batch(shown=np.array([1.0, 2.0])), TypeError, "feature 'shown': "),
    "string keys": (
        batch(shown=np.array(["a", "b"])),
        TypeError,
        "feature 'shown': Identity() takes integers, got the string",
    ),
    "long bag": (
        batch(clicked=js.Ragged.from_lists([[1], [1, 2, 3, 4]])),
        ValueError,
        "feature 'clicked': sample 1 has 4 ids, max_length is 3; "
        "set truncate='head' or 'tail' to cut longer bags",
    ),
    "wide matrix": (
        batch(clicked=np.zeros((2, 5), int)),
        ValueError,
        "feature 'clicked': sample 0 has 5 ids, max_length is 3",
    ),
    "weight": (
        batch(clicked=js.Ragged.from_lists([[1], [2, 3]], weights=[[1.0], [0.5, np.nan]])),
        ValueError,
        "feature 'clicked': weight nan at position 2 is not finite",
    ),
    "infinite weight": (
        batch(clicked=js.Ragged.from_lists([[1], [2]], weights=[[np.inf], [0.5]])),
        ValueError,
        "feature 'clicked': weight inf at position 0 is not finite",
    ),
}


@pytest.mark.parametrize("name", PACK_ERRORS)
def test_pack_refuses(emb, name):
    features, error, text = PACK_ERRORS[name]
    with pytest.raises(error) as raised:
        emb.pack(features)
    assert text in str(raised.value)


def test_pack_refuses_a_rung_below_the_need(emb):
    features = batch(shown=np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]))
    need = emb.pack(features).need
    with pytest.raises(ValueError, match=rf"rung {need - 1} is below the need {need} "):
        emb.pack(features, rung=need - 1)
    assert emb.pack(features, rung=need).rung == need


def test_fixed_capacity_below_the_need_is_refused(emb):
    fixed = js.EmbeddingCollection(FEATURES, mesh=emb.mesh, exchange=js.Exchange(capacity=1))
    features = batch(shown=np.array([[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]))
    with pytest.raises(ValueError, match="rung 1 is below the need"):
        fixed.pack(features)


@pytest.mark.parametrize("rung", [0, -3, 2.0, True, "4"])
def test_pack_refuses_what_is_no_rung(emb, rung):
    with pytest.raises(ValueError, match="rung must be a positive int, a Ladder or None, got"):
        emb.pack(batch(), rung=rung)


# ---- lookup, update ---------------------------------------------------------------------------


def test_lookup_refuses_what_is_not_packed(emb, state):
    with pytest.raises(TypeError, match="ids must be PackedIds, from pack, got dict"):
        emb.lookup(state, batch())


def test_lookup_refuses_ids_of_another_collection(emb, state):
    other = js.EmbeddingCollection(FEATURES[:1], mesh=emb.mesh)
    ids = other.pack({"shown": np.array([1, 2])})
    with pytest.raises(ValueError, match="ids must come from this collection's pack"):
        emb.lookup(state, ids)


def test_lookup_refuses_ids_of_another_mesh(emb, state):
    other = js.EmbeddingCollection(FEATURES, mesh=js.make_mesh(devices=jax.devices()[:1]))
    with pytest.raises(ValueError, match="ids must come from this collection's pack"):
        emb.lookup(state, other.pack(batch()))


GRAD_ERRORS = {
    "missing": ({"shown": (2, 4)}, "{'clicked': ((2, 4), None)}"),
    "unknown": ({"shown": (2, 4), "clicked": (2, 4), "x": (2, 4)}, "{'x': (None, (2, 4))}"),
    "shape": ({"shown": (2, 3), "clicked": (2, 4)}, "{'shown': ((2, 4), (2, 3))}"),
    "unpadded": ({"shown": (1, 4), "clicked": (2, 4)}, "{'shown': ((2, 4), (1, 4))}"),
}


@pytest.mark.parametrize("name", GRAD_ERRORS)
def test_grads_of_another_shape_are_refused(emb, state, name):
    shapes, text = GRAD_ERRORS[name]
    _, residuals = emb.lookup(state, emb.pack(batch()))
    grads = {feature: np.zeros(shape, np.float32) for feature, shape in shapes.items()}
    for function in (emb.row_grads, emb.weight_grads):
        with pytest.raises(ValueError) as raised:
            function(residuals, grads)
        expected = "grads must have the activations' tree and shapes; (expected, got): " + text
        assert expected in str(raised.value)


def test_merge_refuses_gradients_of_two_collections(emb, state):
    acts, residuals = emb.lookup(state, emb.pack(batch()))
    one = emb.row_grads(residuals, acts)
    larger = js.TableSpec("item", vocabulary_size=90, embedding_dim=4)
    features = [js.FeatureSpec("shown", larger)]
    other = js.EmbeddingCollection(features, mesh=emb.mesh)
    acts, residuals = other.lookup(
        other.init(jax.random.key(0)), other.pack({"shown": np.array([1, 2])})
    )
    with pytest.raises(ValueError, match="both must come from the same collection and the same"):
        js.merge_row_grads(one, other.row_grads(residuals, acts))


# ---- reading and writing ----------------------------------------------------------------------


def test_read_refuses(emb, state):
    with pytest.raises(ValueError, match=r"no table 'shown'; tables: \['item'\]"):
        emb.read(state, "shown", [1])
    with pytest.raises(ValueError, match=r"table 'item': key 10 at position 0 is outside 0\.\.9"):
        emb.read(state, "item", [10])
    with pytest.raises(TypeError, match="table 'item': Identity"):
        emb.read_slots(state, "item", ["a"])
    with pytest.raises(
        ValueError, match=r"table 'item': keys must be \[n\], .* got shape \(1, 1\)"
    ):
        emb.read(state, "item", [[1]])


def test_read_refuses_keys_without_a_row(emb):
    spec = js.TableSpec(
        "item", vocabulary_size=10, embedding_dim=4, keys=js.Identity(out_of_range="ignore")
    )
    other = js.EmbeddingCollection([js.FeatureSpec("shown", spec)], mesh=emb.mesh)
    with pytest.raises(ValueError, match=r"each with a row, .* and 2 keys without one"):
        other.read(other.init(jax.random.key(0)), "item", [1, 99, -5])


def test_write_refuses(emb, state):
    with pytest.raises(ValueError, match=r"write 'item': rows must be \(2, 4\), got \(2, 3\)"):
        emb.write(state, "item", [1, 2], np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"write 'item': 2 keys address one row, the first is .*7"):
        emb.write(state, "item", [1, 7, 2, 7], np.zeros((4, 4)))
    for rows, text in (
        (np.full((1, 4), "a"), "write 'item': rows must be real numbers, got <U1"),
        (np.full((1, 4), 1j), "write 'item': rows must be real numbers, got complex128"),
    ):
        with pytest.raises(TypeError, match=re.escape(text)):
            emb.write(state, "item", [1], rows)
    for value, told in ((1e300, "1e+300"), (np.nan, "nan"), (-np.inf, "-inf")):
        text = f"write 'item': every value must be a finite float32, got {told} at [0, 2]"
        with pytest.raises(ValueError, match=re.escape(text)):
            emb.write(state, "item", [1], [[0.0, 1.0, value, 0.0]])
    assert not state.slabs[0].is_deleted(), "a refused write must leave the state alone"


def test_ids_of_another_hash_are_refused():
    def collection(keys):
        table = js.TableSpec("item", vocabulary_size=10, embedding_dim=4, keys=keys)
        return js.EmbeddingCollection([js.FeatureSpec("shown", table)], mesh=MESH)

    emb = collection(js.Hashed(seed=0))
    state = emb.init(jax.random.key(0))
    keys = {"shown": np.array([1, 2])}
    emb.lookup(state, collection(js.Hashed(seed=0)).pack(keys))
    with pytest.raises(ValueError) as caught:
        emb.lookup(state, collection(js.Hashed(seed=1)).pack(keys))
    assert str(caught.value) == (
        "ids of feature 'shown' were packed where keys are hashed (seed 1, 0 exact keys); in table "
        "'item' of this collection keys are hashed (seed 0, 0 exact keys): pack them with it"
    )
    with pytest.raises(ValueError, match="were packed where keys are rows; in table 'item'"):
        emb.lookup(state, collection(js.Identity()).pack(keys))


def test_write_refuses_keys_that_collide(emb):
    spec = js.TableSpec("item", vocabulary_size=3, embedding_dim=4, keys=js.Hashed())
    other = js.EmbeddingCollection([js.FeatureSpec("shown", spec)], mesh=emb.mesh)
    keys = np.arange(4)
    with pytest.raises(ValueError, match="keys address one row"):
        other.write(other.init(jax.random.key(0)), "item", keys, np.zeros((4, 4)))


def test_learning_rate_of_no_table(state):
    with pytest.raises(ValueError, match=r"no trainable table 'user'; trainable: \['item'\]"):
        state.with_learning_rate("user", 0.1)


# ---- packed ids and layout --------------------------------------------------------------------


def test_lengths_of_no_feature(emb):
    with pytest.raises(ValueError, match=r"no feature 'x' here; features: \['shown', 'clicked'\]"):
        emb.pack(batch()).lengths("x")


def test_host_facts_do_not_pass_through_jit(emb):
    ids = jax.jit(lambda ids: ids)(emb.pack(batch()))
    for fact in ("num_samples", "need", "ignored"):
        with pytest.raises(ValueError, match="these PackedIds have passed through jit"):
            getattr(ids, fact)
    assert ids.padded_samples == 2


def test_layout_refuses_another_mesh():
    block = TableBlock(ITEM, "sharded", None, 0, 5, Addressing(10))
    with pytest.raises(ValueError, match="blocks of 5 rows, which are not those of 4 shards"):
        block.locate([1], 4)


def test_make_mesh_refuses():
    with pytest.raises(ValueError, match="make_mesh: devices is empty"):
        js.make_mesh(devices=[])
    with pytest.raises(ValueError, match="nodes must divide the number of devices 4, got 3"):
        js.make_mesh(nodes=3, devices=jax.devices()[:4])
