# SPDX-License-Identifier: Apache-2.0
"""The order of rows: a frozen bijection that spreads any reasonable set of ids evenly."""

import numpy as np
import pytest

from jaxsparse import addressing
from jaxsparse.addressing import Addressing

EXHAUSTIVE = [*range(1, 301), 65_535, 65_536, 65_537, 131_073, 1_000_000]
HUGE = 5 * 10**9


@pytest.mark.parametrize("sizes", [EXHAUSTIVE[:300], EXHAUSTIVE[300:]], ids=["small", "large"])
def test_position_is_a_bijection_with_an_exact_inverse(sizes: list[int]) -> None:
    for size in sizes:
        order = Addressing(size)
        ids = np.arange(size)
        positions = order.position(ids)
        assert positions.dtype == np.int64
        assert positions.min() >= 0 and positions.max() < order.num_positions
        places = np.full(order.num_positions, -1)
        places[positions] = ids
        assert (places >= 0).sum() == size, size  # no two ids at one place
        # Every place, those without a row and those outside the table included.
        np.testing.assert_array_equal(order.id_at(np.arange(order.num_positions)), places)
        outside = [-(2**63), -1, order.num_positions, 2**63 - 1]
        np.testing.assert_array_equal(order.id_at(outside), [-1] * 4)


@pytest.mark.parametrize("size", [HUGE, 2**32 - 1, 2**32 + 1, 2**37 + 12_345, 2**48])
def test_exact_beyond_32_bits(size: int) -> None:
    order = Addressing(size)
    ids = np.random.default_rng(size).integers(0, size, 50_000)
    ids = np.unique(np.concatenate([ids, [0, 1, 2**31, size - 2, size - 1]]).clip(max=size - 1))
    positions = order.position(ids)
    assert np.unique(positions).size == ids.size
    assert positions.min() >= 0 and positions.max() < order.num_positions
    np.testing.assert_array_equal(order.id_at(positions), ids)


def test_huge_vocabulary_against_plain_integers() -> None:
    """The formula of the docstring in Python integers, where nothing can overflow."""
    order = Addressing(HUGE)
    columns = -(-HUGE // 65_536)
    size = -(-HUGE // columns)
    permutation = _permutation_in_plain_integers(size)
    rng = np.random.default_rng(0)
    for row in [0, 1, 2**31, 2**32, HUGE - 1, *map(int, rng.integers(0, HUGE, 200))]:
        column, rank = divmod(row, size)
        place = (permutation[rank] + (_fmix32(column) * size >> 32)) % size
        assert order.position(np.array([row])).tolist() == [place * columns + column]


def _permutation_in_plain_integers(size: int) -> list[int]:
    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    order = sorted(range(size), key=lambda r: mix((r + 1) * 0x9E3779B97F4A7C15 % 2**64))
    places = [0] * size
    for place, rank in enumerate(order):
        places[rank] = place
    return places


def _fmix32(h: int) -> int:
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def test_rotations_with_and_without_a_table_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    order = Addressing(1_000_003)
    ids = np.arange(0, 1_000_003, 7)
    with_table = order.position(ids)
    monkeypatch.setattr(addressing, "MAX_ROTATION_TABLE", 0)
    np.testing.assert_array_equal(order.position(ids), with_table)
    np.testing.assert_array_equal(order.id_at(with_table), ids)


@pytest.mark.parametrize(
    ("size", "ids", "positions"),
    [
        (10, range(10), [7, 5, 0, 9, 1, 4, 2, 6, 3, 8]),
        (65_536, [0, 1, 2, 65_535], [57948, 28338, 1706, 4910]),
        (100_000, [0, 1, 50_000, 99_999], [88328, 43288, 20087, 85155]),
        (10_240_000, [0, 1, 5_120_000, 10_239_999], [9054818, 4426301, 5110585, 1487417]),
        (HUGE, [0, 1, HUGE // 2, HUGE - 1], [4421084712, 2162019372, 4617274732, 4422000239]),
        (10**12, [1, 10**12 // 2, 10**12 - 1], [432403591020, 142936715324, 645172158779]),
    ],
)
def test_order_is_frozen(size: int, ids: list[int], positions: list[int]) -> None:
    """The order is part of the file format: these numbers must never change."""
    assert Addressing(size).position(np.asarray(ids)).tolist() == positions


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_id_outside_the_table(bad: int) -> None:
    with pytest.raises(ValueError, match=rf"id {bad} is outside 0\.\.9 \(1 of 3 ids are\)"):
        Addressing(10).position(np.array([3, bad, 4]))


@pytest.mark.parametrize("size", [0, -5, 2**48 + 1])
def test_vocabulary_size_out_of_range(size: int) -> None:
    with pytest.raises(ValueError, match=f"vocabulary_size must be in 1..*got {size}"):
        Addressing(size)


def test_empty() -> None:
    assert Addressing(10).position(np.array([], np.int64)).shape == (0,)
    assert Addressing(100_000).position([]).dtype == np.int64
    assert Addressing(100_000).id_at([]).shape == (0,)


def _imbalance(order: Addressing, positions: np.ndarray, num_shards: int) -> float:
    """Largest deviation of a shard's rows from the mean, as a share of the mean."""
    owner = positions // order.rows_per_shard(num_shards)
    counts = np.bincount(owner, minlength=num_shards)
    mean = positions.size / num_shards
    return float(np.abs(counts - mean).max() / mean)


@pytest.mark.parametrize("size", [640_000, 1_000_003, 10_240_000, 100_000_000, HUGE])
def test_first_ids_are_spread_evenly(size: int) -> None:
    """Ids 0 .. n-1, n >= 10,000 a shard: frequency-sorted tables start like this."""
    order = Addressing(size)
    first = order.position(np.arange(640_000))
    worst = (0.0, 0, 0)
    for num_shards in range(2, 65):
        for per_shard in (10_000, 640_000 // num_shards):
            n = per_shard * num_shards
            worst = max(worst, (_imbalance(order, first[:n], num_shards), num_shards, n))
    print(f"V = {size:,}: worst {worst[0]:.2%} with {worst[1]} shards, ids 0..{worst[2] - 1:,}")
    assert worst[0] <= 0.05


SLOW_SIZES = (82_000_000, 99_999_989, HUGE)


@pytest.mark.parametrize(
    "size", [10_240_000, *(pytest.param(size, marks=pytest.mark.slow) for size in SLOW_SIZES)]
)
def test_strides_are_spread_evenly(size: int) -> None:
    """Ids 0, s, 2s, ... for s = 2 .. 1,024 on 2 .. 8 shards, 10,000 a shard where V has them."""
    order = Addressing(size)
    found = []
    for stride in range(2, 1025):
        ids = np.arange(0, size, stride)[:80_000] if size < 10**9 else stride * np.arange(80_000)
        positions = order.position(ids)
        for num_shards in range(2, 9):
            n = min(10_000 * num_shards, ids.size)
            found.append((_imbalance(order, positions[:n], num_shards), stride, num_shards, n))
    within = np.mean([deviation <= 0.10 for deviation, *_ in found])
    worst = max(found)
    print(
        f"V = {size:,}: {within:.3%} within 10 %, worst {worst[0]:.2%} "
        f"(stride {worst[1]}, {worst[2]} shards, {worst[3]:,} ids)"
    )
    assert within >= 0.99
