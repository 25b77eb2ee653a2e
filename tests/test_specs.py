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
    ({"tiers": "ssd"}, ValueError, "TableSpec 't': tiers must be None, tables lie on the devices"),
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
    ({"keys": None}, TypeError, "TableSpec 't': keys must be Identity() or Hashed(), got None"),
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
