# SPDX-License-Identifier: Apache-2.0
"""The key index, in C++ and in numpy, against a dict: any keys, growth, snapshots, errors."""

from __future__ import annotations

import logging
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxsparse.ops.native import library
from jaxsparse.store import index as index_module
from jaxsparse.store.index import IndexFullError, KeyIndex, native

NATIVE = pytest.param(
    "native",
    marks=pytest.mark.skipif(
        not library.is_available(), reason=f"no native library: {library.why_not()}"
    ),
)
both = pytest.mark.parametrize("implementation", [NATIVE, "numpy"])

MASK = 2**64 - 1
EDGES = [0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**63 + 1, MASK - 2, MASK - 1, MASK]
"""Keys that others have taken as marks of empty or removed places."""


class Dict:
    """What an index does, with a dict and lists."""

    def __init__(self, capacity=10**9):
        self.capacity, self.rows, self.free, self.high_water = capacity, {}, [], 0

    def find(self, keys):
        return [self.rows.get(key, -1) for key in keys]

    def insert(self, keys):
        if len(self.rows.keys() | set(keys)) > self.capacity:
            return None
        for key in keys:
            if key not in self.rows:
                if self.free:
                    self.rows[key] = self.free.pop()
                else:
                    self.rows[key] = self.high_water
                    self.high_water += 1
        return self.find(keys)

    def remove(self, rows):
        names = {row: key for key, row in self.rows.items()}
        for row in rows:
            del self.rows[names[row]]
            self.free.append(row)

    def arrays(self):
        keys = [0] * self.high_water
        for key, row in self.rows.items():
            keys[row] = key
        return keys, self.free


def array(keys):
    return np.array(keys, np.uint64)


def unmix(value):
    """The key of a hash: `hash_of` in slots.h, backwards."""
    value ^= value >> 33
    value = value * pow(0xC4CEB9FE1A85EC53, -1, 2**64) & MASK
    value ^= value >> 33
    value = value * pow(0xFF51AFD7ED558CCD, -1, 2**64) & MASK
    return value ^ value >> 33


CLASHING = [
    unmix(part << 56 | place << 24 | low)
    for part in (0, 7)
    for place in (0, 2**31, 2**32 - 1)  # the last is followed by the first
    for low in (1, 2, 3, 1 << 16)
]
"""Keys that begin their search at few places; those of low bits 1, 2 and 3 look alike in a slot."""


def assert_same(index, oracle):
    keys, free = oracle.arrays()
    arrays = index.arrays()
    assert arrays["keys"].tolist() == keys and arrays["keys"].dtype == np.uint64
    assert arrays["free"].tolist() == free and arrays["free"].dtype == np.int32
    assert (len(index), index.high_water) == (len(oracle.rows), oracle.high_water)
    rows = sorted(oracle.rows.values())
    assert index.rows().tolist() == rows and index.rows().dtype == np.int32
    assert index.keys_of(np.array(rows, np.int32)).tolist() == [keys[row] for row in rows]
    assert index.find(array(list(oracle.rows))).tolist() == list(oracle.rows.values())


KEYS = st.lists(st.sampled_from(EDGES + CLASHING) | st.integers(0, MASK), max_size=40)
STEPS = st.lists(
    st.tuples(st.sampled_from(["insert", "insert", "find", "remove", "reload"]), KEYS), max_size=12
)


@both
@given(steps=STEPS, capacity=st.integers(1, 60))
def test_any_sequence_does_what_a_dict_does(implementation, steps, capacity):
    index, oracle = KeyIndex(capacity, implementation=implementation), Dict(capacity)
    for step, keys in steps:
        if step == "insert":
            want = oracle.insert(keys)
            if want is None:
                with pytest.raises(IndexFullError):
                    index.insert(array(keys))
            else:
                got = index.insert(array(keys).view(np.int64))
                assert got.tolist() == want and got.dtype == np.int32
        elif step == "find":
            got = index.find(array(keys))
            assert got.tolist() == oracle.find(keys) and got.dtype == np.int32
        elif step == "remove":
            rows = [row for row in dict.fromkeys(oracle.find(keys)) if row >= 0]
            index.remove(np.array(rows, np.int64))
            oracle.remove(rows)
        else:
            index = KeyIndex.from_arrays(capacity, index.arrays(), implementation=implementation)
        assert_same(index, oracle)


@both
def test_keys_that_search_at_the_same_places(implementation):
    """In every order of removal no search ends early."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        index, oracle = KeyIndex(100, implementation=implementation), Dict()
        keys = [CLASHING[i] for i in rng.permutation(len(CLASHING))]
        assert index.insert(array(keys)).tolist() == oracle.insert(keys)
        for row in rng.permutation(len(keys)).tolist():
            index.remove([row])
            oracle.remove([row])
            assert index.find(array(keys)).tolist() == oracle.find(keys)


@both
def test_no_key_is_reserved(implementation):
    """B07: every value is a key like any other, in either signedness, and reads back its row."""
    index = KeyIndex(100, implementation=implementation)
    assert index.find(array(EDGES)).tolist() == [-1] * len(EDGES)
    signed = array(EDGES).view(np.int64)
    assert index.insert(signed).tolist() == list(range(len(EDGES)))
    assert index.find(array(EDGES)).tolist() == list(range(len(EDGES)))
    assert index.find(np.array([-1, -2, 0])).tolist() == [9, 8, 0]
    assert index.keys_of(index.rows()).tolist() == EDGES and len(index) == len(EDGES)
    index.remove([0, 9])
    assert index.find(array([0, MASK, 1])).tolist() == [-1, -1, 1]


@both
def test_growth_keeps_every_row(implementation):
    """E05: rows belong to keys, not to places of the table, however often that grows."""
    index = KeyIndex(100_000, implementation=implementation)
    keys = np.random.default_rng(1).permutation(60_000).astype(np.uint64) << np.uint64(20)
    for end in range(0, keys.size, 61):
        begin, some = max(0, end - 61), keys[:end:997]
        assert index.insert(keys[begin:end]).tolist() == list(range(begin, end))
        assert index.find(some).tolist() == list(range(0, end, 997))
    assert index.find(keys[:end]).tolist() == list(range(end))
    assert (index.find(keys + np.uint64(1)) == -1).all()


@both
def test_rows_beyond_those_a_part_was_made_for(implementation):
    """A part of the table that has long not grown meets rows of more bits."""
    elsewhere = np.random.default_rng(2).integers(2**57, 2**64 - 1, 70_000, np.uint64)
    keys = array([unmix(int(value)) for value in [1, 2, *elsewhere, 3, 1 << 30 | 1]])
    index = KeyIndex(100_000, implementation=implementation)
    assert np.array_equal(index.insert(keys), np.arange(keys.size))
    assert np.array_equal(index.find(keys), np.arange(keys.size))
    assert index.find(array([unmix(4)])).tolist() == [-1]


@pytest.mark.skipif(not library.is_available(), reason="compares it with the native library")
def test_both_implementations_give_the_same_rows():
    """Large batches with repetitions, removals and snapshots that cross over."""
    rng = np.random.default_rng(3)
    indices = {name: KeyIndex(40_000, implementation=name) for name in ("native", "numpy")}
    pool = rng.integers(0, 2**64, 90_000, np.uint64, endpoint=False)
    errors = 0
    for step in range(40):
        keys = pool[rng.integers(0, 3000 * (step + 1), 5000) % pool.size]
        got = {}
        for name, index in indices.items():
            try:
                got[name] = index.insert(keys)
            except IndexFullError as error:
                got[name] = str(error)
                errors += 1
        assert np.array_equal(got["native"], got["numpy"])
        rows = rng.permutation(indices["native"].rows())[: int(rng.integers(0, 3000))]
        for index in indices.values():
            index.remove(rows)
        told = [index.arrays() for index in indices.values()]
        assert all(np.array_equal(told[0][part], told[1][part]) for part in ("keys", "free"))
        if step % 10 == 9:
            indices = {
                name: KeyIndex.from_arrays(40_000, told[1 - i], implementation=name)
                for i, name in enumerate(indices)
            }
    assert errors and indices["native"].implementation == "native"


@both
def test_a_full_index_refuses_before_anything_changes(implementation):
    index = KeyIndex(5, implementation=implementation)
    index.insert(array([10, 11, 12, 13]))
    index.remove([1])
    before = index.arrays()
    message = (
        "a key index of capacity 5 holds 3 keys and would hold 6 with the new ones of this batch; "
        "remove rows first, or give it a larger capacity"
    )
    with pytest.raises(IndexFullError, match=message) as caught:
        index.insert(array([20, 10, 20, 21, 22, 21]))
    assert (caught.value.need, caught.value.have) == (6, 5)
    after = index.arrays()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert index.find(array([20, 21, 22])).tolist() == [-1, -1, -1]
    # As many as fit, repeated more often than there is room; then none but known ones.
    assert index.insert(array([20, 10, 20, 21, 21, 21])).tolist() == [1, 0, 1, 4, 4, 4]
    assert index.insert(array([20, 12, 20, 21, 13, 13])).tolist() == [1, 2, 1, 4, 3, 3]
    with pytest.raises(IndexFullError, match=r"capacity 4 holds 0 keys and would hold 5"):
        KeyIndex.from_arrays(4, index.arrays(), implementation=implementation)


@both
def test_threads_search_while_one_inserts(implementation):
    index = KeyIndex(10**6, implementation=implementation)
    keys = np.random.default_rng(4).integers(0, 2**64 - 1, 40_000, np.uint64)
    known = index.insert(keys[:10_000])
    wrong, done = [], threading.Event()

    def search():
        while True:
            last = done.is_set()
            if not np.array_equal(index.find(keys[:10_000]), known):
                wrong.append("other rows")
            late = index.find(keys[10_000:])
            if not ((late == -1) | (late == np.arange(10_000, 40_000))).all():
                wrong.append("rows of other keys")
            if last:
                return

    threads = [threading.Thread(target=search) for _ in range(4)]
    for thread in threads:
        thread.start()
    for begin in range(10_000, 40_000, 500):
        index.insert(keys[begin : begin + 500])
    done.set()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert np.array_equal(index.find(keys), np.arange(40_000))


@pytest.mark.skipif(not library.is_available(), reason="of the native library")
def test_memory_grows_with_the_keys():
    index = KeyIndex(2**31 - 2)
    assert index.nbytes < 100_000
    rng = np.random.default_rng(5)
    while len(index) < 2_000_000:
        index.insert(rng.integers(0, 2**64 - 1, 65_536, np.uint64))
        if len(index) >= 1_000_000:
            assert index.nbytes <= 17 * len(index)
    assert KeyIndex.from_arrays(2**31 - 2, index.arrays()).nbytes <= 17 * len(index)


OUT_OF_MEMORY = """
import resource, sys
import numpy as np
from jaxsparse.store.index import KeyIndex
index = KeyIndex(2**31 - 2, implementation="native")
keys = np.random.default_rng(0).integers(0, 2**64 - 1, 8_000_000, np.uint64)
size = int(open("/proc/self/statm").read().split()[0]) * 4096
_, most = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size + (40 << 20), most))
begin = 0
try:
    while True:
        index.insert(keys[begin : begin + 50_000])
        begin += 50_000
except MemoryError as error:
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    print(error)
assert begin > 0 and np.array_equal(index.find(keys[:begin]), np.arange(begin))
assert np.array_equal(index.insert(keys), np.arange(keys.size))
"""


@pytest.mark.slow
@pytest.mark.skipif(not library.is_available(), reason="of the native library")
def test_without_memory_for_more_the_keys_that_are_there_stay():
    root = pathlib.Path(__file__).resolve().parents[2]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", OUT_OF_MEMORY]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "no memory for more keys in a key index\n"


def test_an_index_without_memory_is_told(monkeypatch):
    monkeypatch.setattr(native, "function", lambda name: lambda *arguments: None)
    with pytest.raises(MemoryError, match="no memory for a key index"):
        native.Index()


@both
def test_rows_that_are_not_live(implementation):
    index = KeyIndex(100, implementation=implementation)
    index.insert(array([5, 6, 7, 8]))
    index.remove([2])
    before = index.arrays()
    live = r"\(3 rows below 4 are live\)"
    for rows, what in (
        ([0, 2], "row 2 at position 1 has no key"),
        ([4], "row 4 at position 0 has no key"),
        ([0, -1], "row -1 at position 1 has no key"),
        (np.array([1, 2**33]), f"row {2**33} at position 1 has no key"),
        (np.array([2**32 + 1], np.uint64), f"row {2**32 + 1} at position 0 has no key"),
    ):
        for call in (index.remove, index.keys_of):
            with pytest.raises(ValueError, match=f"rows must be live: {what} {live}"):
                call(rows)
    with pytest.raises(ValueError, match=f"row 1 at position 3 has no key any more {live}"):
        index.remove([0, 1, 3, 1])
    assert index.keys_of([1, 1]).tolist() == [6, 6]
    after = index.arrays()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_arguments_of_other_kinds():
    index = KeyIndex(10)
    for keys in (np.array([1], np.int32), np.array([1.0]), ["a"], [2**64]):
        for call in (index.find, index.insert):
            with pytest.raises(TypeError, match="keys must be int64 or uint64, got "):
                call(keys)
    with pytest.raises(ValueError, match=r"keys must be a vector, got shape \(1, 1\); use ravel"):
        index.find(np.zeros((1, 1), np.int64))
    with pytest.raises(ValueError, match=r"rows must be a vector, got shape \(\); use ravel"):
        index.remove(3)
    with pytest.raises(TypeError, match="rows must be integers, got float64"):
        index.keys_of([1.5])
    for capacity in (0, 2**31 - 1):
        with pytest.raises(ValueError, match=f"must be 1 .. 2147483646 keys, got {capacity}"):
            KeyIndex(capacity)
    with pytest.raises(ValueError, match="implementation must be 'native' or 'numpy', got 'c'"):
        KeyIndex(1, implementation="c")


@both
def test_snapshots_that_are_none(implementation):
    def load(**arrays):
        KeyIndex.from_arrays(10, arrays, implementation=implementation)

    keys, free = array([5, 6, 7, 0]), np.array([3], np.int32)
    load(keys=keys, free=free)
    with pytest.raises(ValueError, match=r"has arrays 'free' and 'keys', got \['keys'\]"):
        load(keys=keys)
    with pytest.raises(ValueError, match=r"'keys' in the .* vector of uint64, got int64 of shape"):
        load(keys=keys.view(np.int64), free=free)
    with pytest.raises(ValueError, match=r"'free' .* of int32, got int32 of shape \(1, 1\)"):
        load(keys=keys, free=free[None])
    for wrong in ([3, 3], [4, 3], [-1, 3]):
        with pytest.raises(ValueError, match="rows of the 4 in 'keys', got 2 entries of which 1"):
            load(keys=keys, free=np.array(wrong, np.int32))
    with pytest.raises(ValueError, match="has key 6 in row 2 and in another row too; it is damag"):
        load(keys=array([5, 6, 6, 0]), free=free)
    # The key of a freed row means nothing, and is not kept.
    stale = {"keys": array([5, 6, 6]), "free": np.array([1], np.int32)}
    index = KeyIndex.from_arrays(10, stale, implementation=implementation)
    assert index.arrays()["keys"].tolist() == [5, 0, 6]
    assert index.find(array([6, 0])).tolist() == [2, -1]


def test_numpy_stands_in_and_says_so_once(caplog):
    index_module._tell_once.cache_clear()
    with library.left_out(), caplog.at_level(logging.WARNING, "jaxsparse"):
        assert [KeyIndex(5).implementation for _ in range(2)] == ["numpy", "numpy"]
    assert [record.message for record in caplog.records] == [
        "key indices run in numpy, many times slower than in C++: "
        "`library.left_out` leaves them out"
    ]


def test_a_native_index_that_cannot_be_had_is_refused(monkeypatch):
    monkeypatch.setattr(library, "_loaded", lambda: "no compiler")
    with pytest.raises(RuntimeError, match="not there: no compiler"):
        KeyIndex(5, implementation="native")
