# SPDX-License-Identifier: Apache-2.0
"""Keys to rows: frozen vectors, all dtypes, exact keys against a dict, collisions by count."""

from __future__ import annotations

import collections
import dataclasses
import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsparse.hashing import (
    HASH_VERSION,
    Hashed,
    Identity,
    collision_statistics,
    fingerprint64,
)

MASK64 = 2**64 - 1
ANY_KEY = st.integers(-(2**63), MASK64)
INT_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def splitmix64(key: int) -> int:
    """The published finalizer in Python integers."""
    z = (key + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


# ---------------------------------------------------------------- the frozen hash


def test_version_and_integer_vectors_are_frozen() -> None:
    assert HASH_VERSION == 1
    vectors = {
        0: 0xE220A8397B1DCDAF,  # also the first output of the published generator, seed 0
        1: 0x910A2DEC89025CC1,
        -1: 0xE4D971771B652C20,
        2**63: 0x481EC0A212A9F3DB,
        2**63 - 1: 0x2A67D7552E039EA7,
        2**64 - 2: 0xF3203E9039F4A821,
        720575940631797753: 0xDB831E17B019EEED,
    }
    assert fingerprint64(list(vectors)).tolist() == list(vectors.values())


def test_integer_hash_is_the_published_generator() -> None:
    # splitmix64 seeded with 1234567: its k-th output mixes seed + k increments.
    seeds = [(1234567 + k * 0x9E3779B97F4A7C15) & MASK64 for k in range(3)]
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert fingerprint64(np.array(seeds, np.uint64)).tolist() == published


def test_long_arrays_hash_like_their_entries() -> None:
    keys = np.arange(20_000, dtype=np.int64) * 0x1234567 - 10**9
    want = [splitmix64(key & MASK64) for key in keys.tolist()]
    assert fingerprint64(keys).tolist() == want
    assert fingerprint64(keys[::-1]).tolist() == want[::-1]


def test_string_vectors_are_frozen() -> None:
    vectors = {
        "": 0x2D06800538D394C2,  # published, as the next one
        "a": 0xE6C632B61E964E1F,
        "shoe": 0x3C37D8C621ECB615,
        "日本": 0x2C17FB837F1A1BC0,
        "x" * 300: 0xA5D1B4607DC83554,
    }
    assert fingerprint64(list(vectors)).tolist() == list(vectors.values())
    assert fingerprint64([text.encode() for text in vectors]).tolist() == list(vectors.values())


def test_row_vectors_are_frozen() -> None:
    keys = [0, 1, -1, 2**63, 720575940631797753]
    big = 5 * 10**9
    want = [1658607535, 4200822465, 1968443936, 2362493915, 3342884589]
    assert Hashed().rows(keys, big).tolist() == want
    want = [1602307193, 978119562, 1854726076, 494448294, 4583347697]
    assert Hashed(seed=7).rows(keys, big).tolist() == want
    assert Hashed().rows(keys, 1000).tolist() == [535, 465, 936, 915, 589]
    assert Hashed().rows(["", "a", "shoe"], 1000).tolist() == [138, 719, 701]
    assert Hashed(exact_keys=["a"]).rows(["", "a", "shoe"], 1001).tolist() == [139, 0, 702]
    assert Hashed().digest == 0x31AF5D70511D03398794E9456EE65BE7
    assert Hashed(exact_keys=[3, 5], seed=1).digest == 0xEBEE22028B9C033A1C6E86FF712EC1EF
    assert Hashed(exact_keys=["a", "b"]).digest == 0xCD4388B6DE1DCDAD84DA5015C5DEFDF7


@given(st.lists(ANY_KEY, max_size=50))
def test_integers_against_python_integers(keys: list[int]) -> None:
    want = [splitmix64(key & MASK64) for key in keys]
    assert fingerprint64(keys).tolist() == want
    rows = Hashed().rows(keys, 5 * 10**9)
    assert rows.dtype == np.int64
    assert rows.tolist() == [value % (5 * 10**9) for value in want]


# ---------------------------------------------------------------- dtypes and containers


@pytest.mark.parametrize("addressing", [Identity(), Hashed(), Hashed(exact_keys=[200, 7])])
def test_b12_every_dtype_gives_the_same_rows(addressing: Identity | Hashed) -> None:
    for key, size in ((100, 300), (200, 300), (30000, 70000)):
        want = addressing.rows(np.full(256, key, np.int64), size)
        if isinstance(addressing, Identity):
            assert (want == key).all()
        for dtype in INT_DTYPES:
            if key <= np.iinfo(dtype).max:
                got = addressing.rows(np.full(256, key, dtype), size)
                assert got.dtype == np.int64
                np.testing.assert_array_equal(got, want, err_msg=dtype)


def test_b02_uint32_keys_keep_their_value() -> None:
    keys = [2**32 - 1, 2**31, 0]
    for addressing in (Identity(), Hashed()):
        got = addressing.rows(np.array(keys, np.uint32), 2**33)
        np.testing.assert_array_equal(got, addressing.rows(np.array(keys, np.int64), 2**33))
    assert Identity().rows(np.array(keys, np.uint32), 2**33).tolist() == keys


def test_b14_the_container_does_not_matter() -> None:
    want = fingerprint64(np.array([1]))[0]
    for one in (1, np.int64(1), np.int32(1), np.uint8(1), np.array([5, 1])[1], pa.scalar(1)):
        assert fingerprint64(one).shape == ()
        assert fingerprint64(one) == want
        assert fingerprint64([one])[0] == want
    assert fingerprint64(pa.array([1]))[0] == want
    assert fingerprint64(np.array([1], ">i4"))[0] == want
    assert fingerprint64(np.array([1], object))[0] == want
    want = fingerprint64(["a"])[0]
    letters = ("a", b"a", np.str_("a"), np.bytes_(b"a"), pa.scalar("a"), pa.scalar(b"a"))
    for letter in letters:
        assert fingerprint64([letter])[0] == want
    for array in (np.array(["a", "bc"]), np.array([b"a", b"bc"]), pa.array(["a", "bc"])):
        assert fingerprint64(array)[0] == want
    assert fingerprint64(np.array(["a"], np.dtypes.StringDType()))[0] == want
    assert fingerprint64(["1"])[0] != fingerprint64([1])[0]


def test_64_bit_keys_keep_every_bit() -> None:
    keys = [0, 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 3, 2**64 - 2, 2**64 - 1]
    for array in (keys, np.array(keys, np.uint64), np.array(keys, np.uint64).view(np.int64)):
        assert fingerprint64(array).tolist() == [splitmix64(key) for key in keys]
    exact = Hashed(exact_keys=keys)
    assert exact.rows(np.array(keys, np.uint64), 11).tolist() == list(range(10))
    assert exact.rows(np.array([-1, -2, -3]), 11).tolist() == [9, 8, 7]


def test_shape_is_kept_and_empty_input_works() -> None:
    assert Hashed().rows(np.zeros((2, 3), np.int32), 5).shape == (2, 3)
    assert Identity().rows([[1, 2], (3, 4)], 5).tolist() == [[1, 2], [3, 4]]
    np.testing.assert_array_equal(fingerprint64([["a", "b"]])[0], fingerprint64(["a", "b"]))
    for empty in ([], np.array([]), np.zeros(0, np.int32), np.zeros(0, object), np.zeros(0, "U1")):
        for addressing in (Identity(), Hashed(), Hashed(exact_keys=[1]), Hashed(exact_keys=["a"])):
            rows = addressing.rows(empty, 5)
            assert rows.dtype == np.int64
            assert rows.shape == (0,)


def test_input_is_not_changed() -> None:
    keys = np.array([3, -1, 2], np.int64)
    Hashed().rows(keys, 10)
    Identity("ignore").rows(keys, 10)
    assert keys.tolist() == [3, -1, 2]


@given(st.text(st.characters(), max_size=5))
def test_any_text_hashes_as_its_bytes(text: str) -> None:
    raw = text.encode("utf-8", "surrogatepass")
    assert fingerprint64([text]) == fingerprint64([raw])


# ---------------------------------------------------------------- Identity


def test_identity_names_the_first_key_outside() -> None:
    with pytest.raises(ValueError, match=r"^key 17 at position 3 is outside 0\.\.9$"):
        Identity().rows(np.array([0, 9, 5, 17, 18]), 10)
    with pytest.raises(ValueError, match=r"key -1 at position 1 is outside 0\.\.9"):
        Identity().rows(np.array([0, -1], np.int8), 10)
    with pytest.raises(ValueError, match=r"key 18446744073709551615 at position 0 is outside"):
        Identity().rows(np.array([2**64 - 1], np.uint64), 2**63 - 1)
    with pytest.raises(ValueError, match=r"key 10 at position \(1, 2\) is outside 0\.\.9"):
        Identity().rows(np.array([[1, 2, 3], [4, 5, 10]]), 10)
    with pytest.raises(ValueError, match=r"key -5 at position 1 is outside"):
        Identity().rows([1, -5], 10)


def test_identity_ignore_gives_minus_one() -> None:
    keys = np.array([0, -1, 9, 10, -(2**63)])
    assert Identity("ignore").rows(keys, 10).tolist() == [0, -1, 9, -1, -1]
    assert Identity("ignore").rows(np.array([2**64 - 1, 4], np.uint64), 10).tolist() == [-1, 4]


def test_identity_beyond_32_bits() -> None:
    size = 5 * 10**9
    assert Identity().rows(np.array([size - 1, 2**32]), size).tolist() == [size - 1, 2**32]
    with pytest.raises(
        ValueError, match=r"key 5000000000 at position 0 is outside 0\.\.4999999999"
    ):
        Identity().rows(np.array([size]), size)


def test_b18_identity_refuses_strings_by_example() -> None:
    for keys in (["shoe"], np.array(["shoe"]), np.array([b"shoe"])):
        with pytest.raises(
            TypeError, match=r"takes integers, got the string b?'shoe' at position 0; use Hashed"
        ):
            Identity().rows(keys, 10)


def test_identity_refuses_an_unknown_policy() -> None:
    with pytest.raises(ValueError, match=r"out_of_range must be one of .*'drop'"):
        Identity("drop")  # type: ignore[arg-type]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("addressing", [Identity(), Hashed()])
def test_what_is_no_key_is_refused_by_example(addressing: Identity | Hashed) -> None:
    cases = [
        (np.array([2.0]), r"got float64 2\.0 at position 0; floats hold integers exactly only"),
        ([1, 2.5], r"got float 2\.5 at position 1"),
        (np.array([True]), r"got bool True at position 0; cast booleans"),
        ([3, True], r"got bool True at position 1; cast booleans"),
        ([1, None], r"got NoneType None at position 1; a missing key is an empty bag"),
        ([bytearray(b"a")], r"got bytearray bytearray\(b'a'\) at position 0"),
        ({1: 2}, r"got dict \{1: 2\} at position 0"),
        (["a", 1], r"keys mix integers and strings: 'a' at position 0 is a string"),
        (np.array(["2020-01-01"], "M8[D]"), r"keys must be integers, str or bytes, got"),
        (np.array([1j]), r"keys must be integers, str or bytes, got"),
    ]
    for keys, text in cases:
        with pytest.raises(TypeError, match=text):
            addressing.rows(keys, 10)
    with pytest.raises(ValueError, match=r"must have equal lengths; use Ragged\.from_lists"):
        addressing.rows([[1], [2, 3]], 10)
    for key in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match=f"key {key} at position 1 does not fit 64 bits"):
            addressing.rows([1, key], 10)
    for size in (0, -3):
        with pytest.raises(ValueError, match=rf"vocabulary_size must be in 1\.\..*got {size}"):
            addressing.rows([1], size)


def test_hashed_validates_its_fields() -> None:
    with pytest.raises(ValueError, match=r"exact_keys must be distinct, but 5 at position 2"):
        Hashed(exact_keys=[5, 6, 5])
    with pytest.raises(ValueError, match=r"distinct, but -1 at position 1 is a repetition"):
        Hashed(exact_keys=[2**64 - 1, -1])
    with pytest.raises(ValueError, match=r"non-empty list of keys, got shape \(0,\)"):
        Hashed(exact_keys=[])
    with pytest.raises(ValueError, match=r"non-empty list of keys, got shape \(1, 2\)"):
        Hashed(exact_keys=[[1, 2]])
    for seed in (-1, 2**64, 1.0, True):
        with pytest.raises(ValueError, match="seed must be an int in"):
            Hashed(seed=seed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 exact_keys need a vocabulary_size of at least 3"):
        Hashed(exact_keys=[5, 6]).rows([1], 2)


def test_exact_keys_refuse_the_other_kind() -> None:
    with pytest.raises(TypeError, match="exact_keys are integers, got the string 'a' at position"):
        Hashed(exact_keys=[1]).rows(["a"], 10)
    with pytest.raises(TypeError, match="exact_keys are strings, got the integer 1 at position 0"):
        Hashed(exact_keys=["a"]).rows([1], 10)


# ---------------------------------------------------------------- exact keys


@settings(deadline=None)
@given(
    st.lists(ANY_KEY, min_size=1, max_size=40, unique_by=lambda key: key & MASK64),
    st.lists(ANY_KEY, max_size=40),
    st.integers(1, 100),
)
def test_exact_keys_against_a_dict(exact: list[int], others: list[int], tail: int) -> None:
    hashed = Hashed(exact_keys=exact)
    keys = others + exact
    row_of = {key & MASK64: row for row, key in enumerate(exact)}
    want = [row_of.get(key & MASK64, len(exact) + splitmix64(key & MASK64) % tail) for key in keys]
    assert hashed.rows(keys, len(exact) + tail).tolist() == want


def test_many_exact_keys() -> None:
    rng = np.random.default_rng(0)
    exact = np.unique(rng.integers(0, 2**63, 50_000))
    rng.shuffle(exact)
    hashed = Hashed(exact_keys=exact)
    np.testing.assert_array_equal(hashed.rows(exact, 60_000), np.arange(len(exact)))
    tail = hashed.rows(exact + 1, 60_000)
    assert (tail[~np.isin(exact + 1, exact)] >= len(exact)).all()
    assert tail.max() < 60_000


def test_exact_strings() -> None:
    words = [f"word {i}" for i in range(1000)]
    hashed = Hashed(exact_keys=words)
    assert hashed.rows(np.array(words), 1001).tolist() == list(range(1000))
    assert hashed.rows([word.encode() for word in words], 1001).tolist() == list(range(1000))
    assert hashed.rows(["another"], 1001).tolist() == [1000]


def test_a16_reserved_row() -> None:
    words = [f"user-{i}" for i in range(10**5)]
    assert set(Hashed().rows(words, 4).tolist()) == {0, 1, 2, 3}
    reserved = Hashed(exact_keys=["<pad>"])
    assert set(reserved.rows(words, 4).tolist()) == {1, 2, 3}
    assert reserved.rows(["<pad>"], 4).tolist() == [0]


def test_hashed_is_a_value() -> None:
    words, numbers = ["a", "b"], [3, 5]
    assert Hashed() == Hashed(exact_keys=None)
    assert Hashed(exact_keys=words) == Hashed(exact_keys=np.array([b"a", b"b"]))
    assert Hashed(exact_keys=numbers) == Hashed(exact_keys=np.array(numbers, np.int8))
    assert hash(Hashed(exact_keys=numbers)) == hash(Hashed(exact_keys=tuple(numbers)))
    different = [
        Hashed(),
        Hashed(seed=1),
        Hashed(exact_keys=words),
        Hashed(exact_keys=words[::-1]),
        Hashed(exact_keys=["ab"]),
        Hashed(exact_keys=numbers),
        Hashed(exact_keys=numbers, seed=1),
    ]
    assert len(set(different)) == len(different)
    assert Hashed() != Identity()
    assert repr(Hashed(exact_keys=words)) == "Hashed(exact_keys=<2 keys>, seed=0)"
    hashed = Hashed(exact_keys=words)
    hashed.rows(["a"], 3)
    copy = pickle.loads(pickle.dumps(hashed))
    assert copy == hashed
    assert copy.rows(["b"], 3).tolist() == [1]
    assert dataclasses.replace(hashed, seed=9) == Hashed(exact_keys=words, seed=9)
    with pytest.raises(dataclasses.FrozenInstanceError):
        hashed.seed = 3  # type: ignore[misc]


def test_exact_keys_are_a_copy() -> None:
    keys = np.array([1, 2])
    hashed = Hashed(exact_keys=keys)
    keys[0] = 7
    assert hashed.rows([1, 2], 3).tolist() == [0, 1]


# ---------------------------------------------------------------- spread and collisions


@pytest.mark.parametrize("stride", [1, 2, 1024, 10**6, 2**32, 2**40])
def test_structured_keys_spread_like_random_ones(stride: int) -> None:
    keys = np.arange(64_000, dtype=np.int64) * stride
    for num_rows in (64, 100):
        load = np.bincount(Hashed().rows(keys, num_rows), minlength=num_rows)
        chi2 = ((load - 64_000 / num_rows) ** 2).sum() / (64_000 / num_rows)
        assert abs(chi2 - (num_rows - 1)) < 5 * np.sqrt(2 * (num_rows - 1))


def test_seeds_are_independent() -> None:
    keys = np.arange(10_000)
    same = Hashed().rows(keys, 100) == Hashed(seed=1).rows(keys, 100)
    assert 50 < same.sum() < 160


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), max_size=80), st.integers(1, 50))
def test_collision_statistics_by_brute_force(keys: list[int], size: int) -> None:
    got = collision_statistics(keys, size)
    counts = collections.Counter(keys)
    row_of = {key: splitmix64(key) % size for key in counts}
    sharers = collections.Counter(row_of.values())
    order = sorted(counts, key=lambda key: (-counts[key], splitmix64(key)))
    want = np.zeros((4, 10), np.int64)
    for rank, key in enumerate(order):
        collides = sharers[row_of[key]] > 1
        want[:, rank * 10 // len(order)] += [
            1, counts[key], collides, collides * counts[key]
        ]  # fmt: skip
    assert got.num_keys == len(counts)
    assert got.num_rows_used == len(sharers)
    np.testing.assert_array_equal(
        [got.keys, got.occurrences, got.colliding_keys, got.colliding_occurrences], want
    )
    again = collision_statistics(list(counts), size, list(counts.values()))
    np.testing.assert_array_equal(again.colliding_occurrences, got.colliding_occurrences)


def test_collision_rate_is_the_expected_one() -> None:
    got = collision_statistics(np.arange(10_000), 20_000)
    assert got.collision_rate == pytest.approx(1 - (1 - 1 / 20_000) ** 9_999, abs=0.02)
    exact = Hashed(exact_keys=np.arange(10_000))
    assert collision_statistics(np.arange(10_000), 20_000, hashed=exact).collision_rate == 0
    assert len(str(got).splitlines()) == 11


def test_collision_counts_are_validated() -> None:
    with pytest.raises(ValueError, match=r"counts must have the shape of keys \(2,\), got \(1,\)"):
        collision_statistics([1, 2], 10, [1])
    with pytest.raises(ValueError, match="counts must not be negative, got -1"):
        collision_statistics([1, 2], 10, [1, -1])
    with pytest.raises(TypeError, match="counts must be integers, got float64"):
        collision_statistics([1, 2], 10, [1.0, 2.0])
