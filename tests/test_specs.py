# SPDX-License-Identifier: Apache-2.0
"""What specs refuse, in words that say what to do; how they compare and hash."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js

ITEM = js.TableSpec("item", vocabulary_size=10, embedding_dim=4)


def table(**fields):
    return js.TableSpec(**{"name": "t", "vocabulary_size": 10, "embedding_dim": 4, **fields})


def feature(**fields):
    return js.FeatureSpec(**{"name": "f", "table": ITEM, **fields})


TABLE_ERRORS = [
    ({"name": ""}, ValueError, "TableSpec: name must be a non-empty str, got ''"),
    ({"name": 3}, ValueError, "TableSpec: name must be a non-empty str, got 3"),
    ({"tiers": "ssd"}, TypeError, "TableSpec 't': tiers must be js.Tiers(...) or None, got 'ssd'"),
    (
        {"keys": js.Dynamic(9)},
        ValueError,
        "TableSpec 't': vocabulary_size must be None with Dynamic keys, whose capacity is the most "
        "rows, got 10",
    ),
    ({"vocabulary_size": None}, ValueError, "vocabulary_size must be a positive int, got None"),
    (
        {"keys": js.Dynamic(9), "vocabulary_size": None, "dtype": "bfloat16"},
        ValueError,
        "TableSpec 't': dtype must be float32 with Dynamic keys or tiers, got bfloat16",
    ),
    (
        {"vocabulary_size": 2**31, "tiers": js.Tiers(device_rows=8)},
        ValueError,
        "TableSpec 't': with tiers vocabulary_size must be at most 2147483646, got 2147483648",
    ),
    ({"vocabulary_size": 0}, ValueError, "TableSpec 't': vocabulary_size must be a positive int"),
    ({"vocabulary_size": True}, ValueError, "must be a positive int, got True"),
    ({"vocabulary_size": 2.5}, ValueError, "must be a positive int, got 2.5"),
    ({"embedding_dim": -4}, ValueError, "TableSpec 't': embedding_dim must be a positive int"),
    (
        {"placement": "split"},
        ValueError,
        "placement must be one of ('auto', 'sharded', 'replicated', 'single'), got 'split'",
    ),
    (
        {"dtype": "float16"},
        ValueError,
        "TableSpec 't': dtype must be one of ('float32', 'bfloat16'), got 'float16'",
    ),
    (
        {"keys": None},
        TypeError,
        "TableSpec 't': keys must be Identity(), Hashed() or Dynamic(), got None",
    ),
    (
        {"keys": js.Hashed(exact_keys=list(range(10)))},
        ValueError,
        "TableSpec 't': Hashed: 10 exact_keys need a vocabulary_size of at least 11",
    ),
    (
        {"optimizer": "adam"},
        TypeError,
        "TableSpec 't': optimizer needs init_slots and update "
        "(see jaxsparse.optimizers.SparseOptimizer), got 'adam'",
    ),
]


@pytest.mark.parametrize(("fields", "error", "text"), TABLE_ERRORS)
def test_table_refuses(fields, error, text):
    with pytest.raises(error) as raised:
        table(**fields)
    assert text in str(raised.value)


FEATURE_ERRORS = [
    ({"name": ""}, ValueError, "FeatureSpec: name must be a non-empty str, got ''"),
    ({"table": "item"}, TypeError, "FeatureSpec 'f': table must be a TableSpec, got 'item'"),
    (
        {"combiner": "max"},
        ValueError,
        "FeatureSpec 'f': combiner must be one of ('sum', 'mean', 'sqrtn', None), got 'max'",
    ),
    (
        {"truncate": "middle"},
        ValueError,
        "truncate must be one of ('error', 'head', 'tail'), got 'middle'",
    ),
    ({"max_length": 0}, ValueError, "FeatureSpec 'f': max_length must be a positive int, got 0"),
    ({"combiner": None}, ValueError, "combiner=None needs max_length, the L of [B, L, D]"),
    ({"truncate": "head"}, ValueError, "FeatureSpec 'f': truncate='head' needs max_length"),
]


@pytest.mark.parametrize(("fields", "error", "text"), FEATURE_ERRORS)
def test_feature_refuses(fields, error, text):
    with pytest.raises(error) as raised:
        feature(**fields)
    assert text in str(raised.value)


def test_exchange_refuses():
    with pytest.raises(ValueError, match="Exchange: capacity must be a positive int, got 0"):
        js.Exchange(capacity=0)
    with pytest.raises(ValueError, match=r"Exchange: wire_dtype must be one of .* got 'int8'"):
        js.Exchange(wire_dtype="int8")


def test_dtypes_are_settled():
    assert table(dtype=jnp.bfloat16) == table(dtype="bfloat16")
    assert table(dtype=jnp.float32).dtype == np.dtype("float32")
    assert js.Exchange(wire_dtype=jnp.bfloat16).wire_dtype == np.dtype("bfloat16")


def test_specs_are_hashable_and_rates_take_no_part():
    assert hash(table(optimizer=js.SGD(0.1))) == hash(table(optimizer=js.SGD(0.2)))
    assert table(optimizer=js.SGD(0.1)) == table(optimizer=js.SGD(0.2))
    assert table(optimizer=js.SGD(0.1)) != table(optimizer=js.Adagrad(0.1))
    assert len({feature(), feature(combiner="mean"), feature()}) == 2


STORE_ERRORS = [
    (lambda: js.Dynamic(0), ValueError, "Dynamic: capacity must be an int in 1..2147483646, got 0"),
    (
        lambda: js.Dynamic(9, admission=2),
        TypeError,
        "Dynamic: admission must be None or one of js.CountAdmission(...), "
        "js.ProbabilityAdmission(...), js.BloomAdmission(...), got 2",
    ),
    (
        lambda: js.Dynamic(9, eviction="lru"),
        TypeError,
        "Dynamic: eviction must be None or one of js.LRU(...), js.LFU(...), js.TTL(...), "
        "js.L2Norm(...), got 'lru'",
    ),
    (
        lambda: js.CountAdmission(0),
        ValueError,
        "CountAdmission: min_count must be an int >= 1, got 0",
    ),
    (
        lambda: js.CountAdmission(2, default_row="zero"),
        ValueError,
        "CountAdmission: default_row must be one of ('trained', 'fixed'), got 'zero'",
    ),
    (
        lambda: js.ProbabilityAdmission(0),
        ValueError,
        "ProbabilityAdmission: p must be a finite number > 0, got 0",
    ),
    (
        lambda: js.ProbabilityAdmission(1.5),
        ValueError,
        "ProbabilityAdmission: p must be in (0, 1], got 1.5",
    ),
    (
        lambda: js.BloomAdmission(256, bytes=1000),
        ValueError,
        "BloomAdmission: min_count must be an int in 1..255, got 256",
    ),
    (
        lambda: js.BloomAdmission(2, bytes=10),
        ValueError,
        "BloomAdmission: bytes must be an int >= 64, got 10",
    ),
    (
        lambda: js.TTL(),
        ValueError,
        "TTL: give steps or seconds, got steps=None, seconds=None",
    ),
    (lambda: js.TTL(steps=0), ValueError, "TTL: steps must be an int >= 1, got 0"),
    (
        lambda: js.TTL(seconds=-1.0),
        ValueError,
        "TTL: seconds must be a finite number > 0, got -1.0",
    ),
    (lambda: js.L2Norm(below=0), ValueError, "L2Norm: below must be a finite number > 0, got 0"),
    (
        lambda: js.Tiers(device_rows=0),
        ValueError,
        "Tiers: device_rows must be an int >= 1, got 0",
    ),
    (
        lambda: js.Tiers(device_rows=1, host_rows=-1, ssd=["a"]),
        ValueError,
        "Tiers: host_rows must be an int >= 0, got -1",
    ),
    (
        lambda: js.Tiers(device_rows=1, host_rows=8),
        ValueError,
        "Tiers: host_rows=8 needs ssd=[folders] for the rows beyond it",
    ),
    (
        lambda: js.Tiers(device_rows=1, ssd=["a", "a/"]),
        ValueError,
        "Tiers: ssd must name each folder once, got ('a', 'a')",
    ),
    (lambda: js.Tiers(device_rows=1, ssd=3), TypeError, "Tiers: ssd must be a list of folders"),
]


@pytest.mark.parametrize(("make", "error", "text"), STORE_ERRORS)
def test_what_stored_tables_declare_is_checked(make, error, text):
    with pytest.raises(error) as raised:
        make()
    assert text in str(raised.value)


def test_stored_tables_are_hashable_and_tell_themselves_apart():
    tables = [
        table(),
        table(tiers=js.Tiers(device_rows=4)),
        table(tiers=js.Tiers(device_rows=4, host_rows=2, ssd=["a"])),
        table(vocabulary_size=None, keys=js.Dynamic(10)),
        table(vocabulary_size=None, keys=js.Dynamic(10, js.CountAdmission(2), js.LFU())),
    ]
    assert len({hash(spec) for spec in tables}) == len(tables)
    assert [spec.is_stored for spec in tables] == [False, True, True, True, True]
    assert tables[1] == table(tiers=js.Tiers(device_rows=4, ssd=[]))
