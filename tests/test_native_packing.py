# SPDX-License-Identifier: Apache-2.0
"""The native host code against its meaning in numpy: whole batches, bit by bit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxsparse as js
from jaxsparse.ladder import smallest_shape
from jaxsparse.ops.native import library

pytestmark = pytest.mark.skipif(
    not library.is_available(), reason=f"no native library: {library.why_not()}"
)

HUGE = 2**34 - 2**20
"""Rows of a table whose codes need more than 32 bits on 8 devices, near the most there can be."""

TABLES = {
    "one": js.TableSpec("one", vocabulary_size=1, embedding_dim=4),
    "small": js.TableSpec("small", vocabulary_size=50, embedding_dim=4, placement="sharded"),
    "columns": js.TableSpec("columns", vocabulary_size=200_003, embedding_dim=4),
    "lenient": js.TableSpec(
        "lenient", vocabulary_size=40, embedding_dim=4, keys=js.Identity("ignore")
    ),
    "huge": js.TableSpec("huge", vocabulary_size=HUGE, embedding_dim=2, optimizer=js.SGD(0.1)),
    "hashed": js.TableSpec("hashed", vocabulary_size=90_000, embedding_dim=4, keys=js.Hashed()),
    "exact": js.TableSpec(
        "exact",
        vocabulary_size=70_000,
        embedding_dim=4,
        keys=js.Hashed(np.arange(0, 60, 3), seed=7),
        placement="single",
    ),
    "copied": js.TableSpec("copied", vocabulary_size=33, embedding_dim=4, placement="replicated"),
}

POOLED = ({}, {"combiner": "mean"}, {"padding_id": 3}, {"max_length": 3, "truncate": "head"})
UNPOOLED = (
    {"combiner": None, "max_length": 9},
    {"combiner": None, "max_length": 9, "padding_id": 3},
    {"combiner": None, "max_length": 2, "truncate": "tail", "padding_id": 3},
)
KINDS = (*POOLED, *UNPOOLED)


@functools.cache
def collection(names, kinds, num_devices):
    features = [
        js.FeatureSpec(f"{name}{i}", TABLES[name], **KINDS[kind])
        for i, (name, kind) in enumerate(zip(names, kinds, strict=True))
    ]
    return js.EmbeddingCollection(features, mesh=js.make_mesh(devices=jax.devices()[:num_devices]))


@contextlib.contextmanager
def numpy_alone():
    with mock.patch.object(library, "_loaded", lambda: "left out"):
        yield


def packed(emb, batch, path):
    prepared = emb.prepare(batch)
    needs = prepared.needs()
    ids = prepared.pack([smallest_shape(need) for need in needs], needs, path)
    return [ids.with_local_value_slots(), needs]


def assert_equal(one, other):
    """Equal leaves, dtypes and static parts, and equal facts on the host."""
    leaves, form = jax.tree.flatten(one)
    other_leaves, other_form = jax.tree.flatten(other)
    assert form == other_form
    for leaf, other_leaf in zip(leaves, other_leaves, strict=True):
        np.testing.assert_array_equal(leaf, other_leaf)
        assert np.asarray(leaf).dtype == np.asarray(other_leaf).dtype
    facts, other_facts = dataclasses.asdict(one[0].host), dataclasses.asdict(other[0].host)
    for slots, other_slots in zip(
        facts.pop("value_slots"), other_facts.pop("value_slots"), strict=True
    ):
        assert slots.keys() == other_slots.keys()
        for name in slots:
            np.testing.assert_array_equal(slots[name], other_slots[name])
    assert facts == other_facts


def check(emb, batch):
    for path in ("native", "xla"):
        native = packed(emb, batch, path)
        with numpy_alone():
            assert_equal(native, packed(emb, batch, path))


def keys_for(rng, spec, size):
    """Keys with repetitions, padding, and strangers where the table takes them."""
    table = spec.table
    top = table.vocabulary_size
    drawn = rng.integers(0, top, size) if rng.random() < 0.5 else rng.integers(0, min(top, 4), size)
    if isinstance(table.keys, js.Hashed):
        drawn = rng.choice([drawn - 30, rng.integers(-(2**63), 2**63 - 1, size)])
    elif table.keys.out_of_range == "ignore":
        drawn = drawn + rng.integers(-2, 9, size)
    if spec.padding_id is not None and rng.random() < 0.8:
        drawn = np.where(rng.random(size) < 0.3, spec.padding_id, drawn)
        if isinstance(table.keys, js.Identity) and top <= 3:
            drawn = np.where(drawn == 3, 3, np.clip(drawn, 0, top - 1))
    return drawn


def value_for(rng, spec, samples):
    form = rng.choice(["one", "several", "bags", "weighted"])
    dtype = rng.choice([np.int64, np.int64, np.int32, np.uint64, np.int16])
    if form in ("one", "several"):
        shape = (samples,) if form == "one" else (samples, rng.integers(1, 6))
        keys = keys_for(rng, spec, shape)
    else:
        lengths = rng.integers(0, 6, samples) * (rng.random(samples) < 0.7)
        keys = keys_for(rng, spec, int(lengths.sum()))
    if np.array_equal(keys.astype(dtype).astype(np.int64), keys) and (
        dtype != np.uint64 or not (keys < 0).any()
    ):
        keys = keys.astype(dtype)
    if form in ("one", "several"):
        return keys
    weights = rng.random(keys.size).astype(np.float32) if form == "weighted" else None
    return js.Ragged.from_lengths(keys, lengths, weights)


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(TABLES)), st.sampled_from(range(len(KINDS)))),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([0, 1, 5, 24, 200]),
    st.integers(0, 2**32),
)
def test_native_packs_the_same_bits(features, num_devices, samples, seed):
    names, kinds = zip(*features, strict=True)
    emb = collection(names, kinds, num_devices if "huge" not in names else 8)
    rng = np.random.default_rng(seed)
    check(emb, {spec.name: value_for(rng, spec, samples) for spec in emb.features})


@pytest.mark.parametrize("num_devices", [1, 8])
def test_odd_batches(num_devices):
    emb = collection(("small", "small", "lenient"), (0, 2, 0), num_devices)
    for size, key in [(0, 0), (1, 7), (40, 7), (40, 3), (2_000, 3)]:
        keys = np.full(size, key)
        check(emb, {spec.name: keys for spec in emb.features})
        check(
            emb, {spec.name: np.asfortranarray(np.c_[keys, keys])[:, ::-1] for spec in emb.features}
        )


@pytest.mark.parametrize("order", ["<", ">"])
def test_padding_above_63_bits_is_found_in_either_byte_order(order):
    padding = 2**63 + 5
    spec = js.FeatureSpec("hashed", TABLES["hashed"], padding_id=padding)
    emb = js.EmbeddingCollection([spec], mesh=js.make_mesh(devices=jax.devices()[:1]))
    keys = np.array([[1, padding], [padding, padding], [2, 3]], f"{order}u8")
    check(emb, {"hashed": keys})
    assert emb.pack({"hashed": keys}).lengths("hashed").tolist() == [1, 0, 2]


def test_large_batches_are_cut_over_threads():
    rng = np.random.default_rng(0)
    emb = collection(("columns", "hashed", "columns"), (0, 0, 1), 1)
    bags = js.Ragged.from_lengths(
        np.minimum(rng.zipf(1.2, 60_000), 200_003) - 1, np.full(20_000, 3)
    )
    many = rng.integers(0, 90_000, 20_000)
    check(emb, {"columns0": many, "hashed1": many, "columns2": bags})


def test_threads_may_pack_at_the_same_time():
    emb = collection(("small", "columns", "hashed"), (0, 0, 1), 8)
    batches = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        batches.append({spec.name: rng.integers(0, 50, (900, 3)) for spec in emb.features})
    wanted = [packed(emb, batch, "native") for batch in batches]
    failures = []

    def work(number):
        try:
            for _ in range(20):
                assert_equal(packed(emb, batches[number], "native"), wanted[number])
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([1, 50]), "feature 'small0': key 50 at position 1 is outside 0..49"),
        (np.array([[1, -1]]), r"feature 'small0': key -1 at position 1 is outside 0..49"),
        (js.Ragged.from_lists([[1], [77]]), "feature 'small0': key 77 at position 1 is outside"),
        (np.array([0.5]), "feature 'small0': keys must be integers, str or bytes, got float64"),
        (
            js.Ragged.from_lists([[1]], [[float("nan")]]),
            "feature 'small0': weight nan at position 0 is not finite",
        ),
    ],
)
def test_numpy_tells_what_the_kernels_refuse(value, message):
    emb = collection(("small",), (0,), 1)
    with pytest.raises((ValueError, TypeError), match=message):
        emb.pack({"small0": value})


@pytest.mark.parametrize("kind", [0, 2, 3])
@pytest.mark.parametrize("splits", [[0, 10**9, 3], [1, 2, 3], [0, 2, 10**9], [0, 2, 2]])
def test_bags_that_were_overwritten_since_they_were_made_are_refused(kind, splits):
    """Their splits say what memory is read."""
    emb = collection(("small",), (kind,), 1)
    bags = js.Ragged.from_lists([[1, 2], [3]])
    bags.row_splits[:] = splits
    with pytest.raises(ValueError, match="feature 'small0': `row_splits` "):
        emb.pack({"small0": bags})


def test_the_first_wrong_feature_is_told():
    emb = collection(("small", "small"), (0, 0), 1)
    with pytest.raises(ValueError, match="feature 'small0': key 99"):
        emb.pack({"small0": np.array([99]), "small1": np.array([0.5])})


def test_a_batch_is_copied_before_it_is_laid_out():
    """A reader may fill its arrays anew once `prepare` has returned."""
    emb = collection(("small", "columns"), (0, 0), 1)
    bags = js.Ragged.from_lengths(np.arange(6), np.array([1, 0, 5]))
    batch = {"small0": np.arange(3), "columns1": bags}
    wanted = packed(emb, batch, "native")
    prepared = emb.prepare(batch)
    batch["small0"][:] = bags.values[:] = bags.row_splits[:] = 0
    needs = prepared.needs()
    ids = prepared.pack([smallest_shape(need) for need in needs], needs, "native")
    assert_equal([ids.with_local_value_slots(), needs], wanted)
