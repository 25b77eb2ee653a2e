# SPDX-License-Identifier: Apache-2.0
"""Layouts give every row of every table one place, on any number of shards."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest

from jaxsparse.layout import MAX_ROWS_PER_SHARD, Layout, make_layout, slab_key
from jaxsparse.optimizers import SGD, Adagrad
from jaxsparse.specs import TableSpec


@dataclasses.dataclass(frozen=True)
class Given:
    placements: Mapping[str, str]
    shard_of: Mapping[str, int] = dataclasses.field(default_factory=dict)


def _table(name: str, rows: int, dim: int = 4, **kwargs: object) -> TableSpec:
    return TableSpec(name, vocabulary_size=rows, embedding_dim=dim, **kwargs)  # type: ignore[arg-type]


def _layout(tables: list[TableSpec], num_shards: int, **given: str | int) -> Layout:
    """``name="sharded"`` and so on; a number is the shard of a single table."""
    placements = {t.name: given.get(t.name, "sharded") for t in tables}
    shard_of = {name: p for name, p in placements.items() if isinstance(p, int)}
    named = {name: "single" if isinstance(p, int) else p for name, p in placements.items()}
    return make_layout(tables, num_shards, Given(named, shard_of))


def _places(layout: Layout, table: str) -> tuple[np.ndarray, np.ndarray]:
    slab, index = layout.find(table)
    block = slab.tables[index]
    return block.locate(np.arange(block.spec.vocabulary_size), layout.num_shards)


def _assert_sound(layout: Layout) -> None:
    """Every id located once, in bounds, in its block, and no two ids at one place."""
    for slab in layout.slabs:
        starts = slab.table_starts(layout.num_shards)
        seen = np.zeros((layout.num_shards, slab.rows_per_shard), bool)
        for index, block in enumerate(slab.tables):
            shard, row = _places(layout, block.spec.name)
            assert shard.dtype == row.dtype == np.int64
            assert shard.min() >= 0 and shard.max() < layout.num_shards
            assert row.min() >= 0 and row.max() < slab.rows_per_shard
            assert not seen[shard, row].any()
            seen[shard, row] = True
            assert seen.sum() == sum(b.spec.vocabulary_size for b in slab.tables[: index + 1])
            # The table of a row: the largest start not above it.
            below = np.where(starts[shard] <= row[:, None], starts[shard], -1)
            assert (below.argmax(axis=1) == index).all()


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 7, 8])
def test_d01_rows_need_not_be_a_multiple_of_the_mesh(num_shards: int) -> None:
    layout = _layout([_table("t", 4091)], num_shards)
    shard, _ = _places(layout, "t")
    per_shard = np.bincount(shard, minlength=num_shards)
    assert per_shard.sum() == 4091
    assert per_shard.max() <= layout.slabs[0].rows_per_shard == -(-4091 // num_shards)
    _assert_sound(layout)


def test_d02_fewer_rows_than_devices() -> None:
    layout = _layout([_table("t", 2, dim=3)], 8)
    shard, row = _places(layout, "t")
    assert sorted(shard) == [0, 1] and row.tolist() == [0, 0]
    assert layout.slabs[0].rows_per_shard == 1
    _assert_sound(layout)


@pytest.mark.parametrize("num_shards", [1, 3, 8])
def test_tables_of_one_slab_do_not_overlap(num_shards: int) -> None:
    tables = [
        _table("late_single", 50),
        _table("a", 100_000),
        _table("b", 2),
        _table("other_single", 90),
        _table("copy", 30),
        _table("wide", 70, dim=8),
    ]
    last = num_shards - 1
    layout = _layout(tables, num_shards, late_single=last, other_single=0, copy="replicated")
    assert [[b.spec.name for b in slab.tables] for slab in layout.slabs] == [
        ["a", "b", "late_single", "other_single"],  # sharded first, then singles, as declared
        ["copy"],
        ["wide"],
    ]
    assert [slab.name for slab in layout.slabs] == [
        "d4_float32_adagrad",
        "d4_float32_adagrad_replicated",
        "d8_float32_adagrad",
    ]
    _assert_sound(layout)


def test_a_shard_is_as_long_as_the_fullest_one() -> None:
    tables = [_table("a", 10), _table("s0", 3), _table("s1", 8), _table("s1b", 2)]
    (slab,) = _layout(tables, 3, s0=0, s1=1, s1b=1).slabs
    assert slab.rows_per_shard == 4 + 8 + 2
    assert slab.table_starts(3).tolist() == [[0, 4, 14, 14], [0, 14, 4, 12], [0, 14, 14, 14]]


def test_a_replicated_table_is_whole_at_shard_0() -> None:
    layout = _layout([_table("a", 5), _table("b", 6)], 4, a="replicated", b="replicated")
    assert layout.slabs[0].replicated and layout.slabs[0].rows_per_shard == 11
    shard, row = _places(layout, "b")
    assert (shard == 0).all() and sorted(row) == list(range(5, 11))
    assert layout.slabs[0].table_starts(4).tolist() == [[0, 5]] * 4


def test_what_shares_a_slab() -> None:
    same = slab_key(_table("a", 5, optimizer=Adagrad(0.1)), "sharded")
    assert same == slab_key(_table("b", 9, optimizer=Adagrad(0.2)), "single")
    assert same != slab_key(_table("b", 9), "replicated")
    assert same != slab_key(_table("b", 9, dim=5), "sharded")
    assert same != slab_key(_table("b", 9, dtype="bfloat16"), "sharded")
    assert same != slab_key(_table("b", 9, optimizer=SGD(0.1)), "sharded")
    assert same != slab_key(_table("b", 9, trainable=False), "sharded")


def test_slab_names_are_unique() -> None:
    rules = [Adagrad(0.1), Adagrad(0.1, eps=1e-6), Adagrad(0.1, eps=1e-5)]
    tables = [_table(f"t{i}", 5, optimizer=rule) for i, rule in enumerate(rules)]
    names = [slab.name for slab in _layout([*tables, _table("f", 5, trainable=False)], 2).slabs]
    assert names == [
        "d4_float32_adagrad",
        "d4_float32_adagrad_2",
        "d4_float32_adagrad_3",
        "d4_float32_frozen",
    ]


def test_five_billion_rows() -> None:
    size = 5 * 10**9
    layout = _layout([_table("a", 1000), _table("t", size)], 8)
    slab, index = layout.find("t")
    block = slab.tables[index]
    ids = np.unique(np.random.default_rng(0).integers(0, size, 100_000))
    shard, row = block.locate(ids, 8)
    assert row.min() >= block.offset == 125 and row.max() < slab.rows_per_shard < 2**31
    assert np.unique(shard * slab.rows_per_shard + row).size == ids.size
    position = shard * block.rows + row - block.offset
    np.testing.assert_array_equal(block.addressing.id_at(position), ids)


def test_more_rows_than_int32_addresses() -> None:
    with pytest.raises(
        ValueError, match=r"needs 2,500,.* rows on a shard.* have 2,147,483,646.*'t'"
    ):
        _layout([_table("t", 5 * 10**9)], 2)
    (slab,) = _layout([_table("t", MAX_ROWS_PER_SHARD // 65_536 * 65_536)], 1).slabs
    assert slab.rows_per_shard <= MAX_ROWS_PER_SHARD


def test_layouts_are_hashable_and_equal_by_value() -> None:
    layouts = [_layout([_table("a", 100), _table("b", 7)], 4, b=3) for _ in range(2)]
    assert layouts[0] == layouts[1] and hash(layouts[0]) == hash(layouts[1])
    assert layouts[0] != _layout([_table("a", 100), _table("b", 7)], 4, b=2)


def test_wrong_names_and_meshes_are_refused() -> None:
    layout = _layout([_table("a", 100)], 4)
    with pytest.raises(KeyError, match=r"no table 'z'; known: \['a'\]"):
        layout.find("z")
    with pytest.raises(ValueError, match=r"'a' has blocks of 25 rows.* of 3 shards"):
        layout.slabs[0].tables[0].locate(np.arange(3), 3)
