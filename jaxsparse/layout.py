# SPDX-License-Identifier: Apache-2.0
"""Which slab, shard and local row every row of every table lies in."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from jaxsparse.addressing import Addressing
from jaxsparse.optimizers import SparseOptimizer
from jaxsparse.resident import ResidentTable
from jaxsparse.specs import TableSpec

MAX_ROWS_PER_SHARD = 2**31 - 2
"""Most rows of a slab on a shard: local rows are int32, and one value stands for "no row"."""

IntArray = npt.NDArray[np.int64]
SlabKey = tuple[object, ...]


class Assignment(Protocol):
    """Where the tables go; a `Plan` is one."""

    @property
    def placements(self) -> Mapping[str, str]:
        """``sharded``, ``replicated`` or ``single`` of every table."""
        ...

    @property
    def shard_of(self) -> Mapping[str, int]:
        """Shard of every ``single`` table."""
        ...


@dataclasses.dataclass(frozen=True)
class TableBlock:
    """The rows of one table on a shard, in position order (see `Addressing`).

    A ``sharded`` table is cut into blocks of equal size, one a shard, at the same offset on all
    of them; the last ones may be partly or wholly without rows. A ``single`` table lies whole on
    one shard, a ``replicated`` one whole on every device.
    """

    spec: TableSpec
    """The table."""

    placement: str
    """``sharded``, ``replicated`` or ``single``."""

    shard: int | None
    """Shard of a ``single`` table, else None."""

    offset: int
    """First row of the block in the slab, on every shard that has one."""

    rows: int
    """Rows of the block: ceil(P / num_shards) when sharded, else all P."""

    addressing: Addressing
    """The table's order."""

    def locate(self, ids: npt.ArrayLike, num_shards: int) -> tuple[IntArray, IntArray]:
        """Shard and local row of ids.

        Args:
            ids: ``[N]`` integers in [0, vocabulary_size).
            num_shards: shards of the layout this block belongs to.

        Returns:
            shard ``[N]`` int64 in [0, num_shards), 0 for a replicated table, and the row
            ``[N]`` int64 in that shard's part of the slab.

        Raises:
            ValueError: an id outside the table, or the block was cut for another mesh.
        """
        position = self.addressing.position(ids)
        if self.placement != "sharded":
            shard = np.full_like(position, self.shard or 0)
            return shard, position + self.offset
        if self.rows != self.addressing.rows_per_shard(num_shards):
            raise ValueError(
                f"table {self.spec.name!r} has blocks of {self.rows} rows, which are not those "
                f"of {num_shards} shards"
            )
        shard = position // self.rows
        return shard, position - shard * self.rows + self.offset


@dataclasses.dataclass(frozen=True)
class SlabLayout:
    """One physical array of tables that take the same path.

    Sharded tables come first, at the same rows of every shard, then each shard's single tables::

        shard 0 | A[0:a] | B[0:b] | C whole |           rows_per_shard R rows on every shard
        shard 1 | A[a:2a]| B[b:2b]| D whole, the longest|
    """

    name: str
    """Unique in the layout and valid in a path, such as ``d16_float32_adagrad``."""

    dim: int
    """Width of a row, in elements."""

    dtype: np.dtype[np.generic]
    """Of the weights."""

    optimizer: SparseOptimizer
    """The tables' rule; where it compares equal without its learning rate, the first table's."""

    trainable: bool
    """False: no slots, no updates."""

    replicated: bool
    """True: every device holds all R rows."""

    rows_per_shard: int
    """R: rows on each shard, those of the fullest one; at least 1."""

    tables: tuple[TableBlock, ...]
    """Sharded tables in declared order, then single ones in declared order."""

    @property
    def is_stored(self) -> bool:
        """Whether its rows come and go: it has places of a row store (`resident`)."""
        return isinstance(self.tables[0].spec, ResidentTable)

    def table_starts(self, num_shards: int) -> IntArray:
        """First row of each table's block on each shard.

        The table of a row is the one with the *largest start not above it*: starts are not
        sorted along a shard, because a single table that lies elsewhere starts at R, behind
        every row.

        Returns:
            ``[num_shards, T]`` int64.
        """
        starts = np.full((num_shards, len(self.tables)), self.rows_per_shard, np.int64)
        for column, block in enumerate(self.tables):
            starts[slice(None) if block.shard is None else block.shard, column] = block.offset
        return starts


@dataclasses.dataclass(frozen=True)
class Layout:
    """All slabs, in the order their first table was declared."""

    slabs: tuple[SlabLayout, ...]
    """The slabs; every table is in exactly one."""

    num_shards: int
    """Devices of the mesh, all axes flattened."""

    @functools.cached_property
    def _index(self) -> dict[str, tuple[SlabLayout, int]]:
        return {b.spec.name: (s, i) for s in self.slabs for i, b in enumerate(s.tables)}

    def find(self, table: str) -> tuple[SlabLayout, int]:
        """The slab of a table, and the table's index in it.

        Raises:
            KeyError: no such table; the message lists the known ones.
        """
        if table not in self._index:
            raise KeyError(f"no table {table!r}; known: {sorted(self._index)}")
        return self._index[table]


def fixed_rows(slab: SlabLayout, num_shards: int) -> list[tuple[int, int]]:
    """Shard and local row of each row of a slab that no update moves."""
    found = []
    for block in slab.tables:
        spec = block.spec
        if isinstance(spec, ResidentTable) and spec.is_default_fixed:
            assert spec.default_row is not None
            shard, row = block.locate([spec.default_row], num_shards)
            found.append((int(shard[0]), int(row[0])))
    return found


def slab_key(table: TableSpec, placement: str) -> SlabKey:
    """Tables with equal keys share a slab: one dedup, one exchange, one update for all.

    Stored tables share with stored ones only, so that a row store may exchange whole rows of
    their slabs.
    """
    kinds = placement == "replicated", isinstance(table, ResidentTable)
    return table.embedding_dim, table.dtype, table.optimizer, table.trainable, *kinds


def make_layout(tables: Sequence[TableSpec], num_shards: int, plan: Assignment) -> Layout:
    """Stacks tables into slabs and cuts them by shard.

    Args:
        tables: with unique names; their order is the order in the slabs.
        num_shards: devices of the mesh.
        plan: placement of every table, and shard of the single ones.

    Raises:
        ValueError: a slab has more rows on a shard than int32 can address.

    >>> import types
    >>> tables = [TableSpec("a", vocabulary_size=10, embedding_dim=4),
    ...           TableSpec("b", vocabulary_size=7, embedding_dim=4)]
    >>> plan = types.SimpleNamespace(placements={"a": "sharded", "b": "single"}, shard_of={"b": 1})
    >>> slab, = make_layout(tables, 2, plan).slabs
    >>> slab.name, slab.rows_per_shard, slab.table_starts(2).tolist()
    ('d4_float32_adagrad', 12, [[0, 12], [0, 5]])
    """
    groups: dict[SlabKey, list[TableSpec]] = {}
    for table in tables:
        groups.setdefault(slab_key(table, plan.placements[table.name]), []).append(table)
    slabs: list[SlabLayout] = []
    for members in groups.values():
        blocks, rows = _stack(members, num_shards, plan)
        taken = {slab.name for slab in slabs}
        slab = _make_slab(blocks, rows, taken)
        slabs.append(slab)
    return Layout(tuple(slabs), num_shards)


def _stack(
    tables: Sequence[TableSpec], num_shards: int, plan: Assignment
) -> tuple[list[TableBlock], int]:
    """Blocks of one slab's tables, and the rows of its fullest shard."""
    blocks = []
    ends = [0] * num_shards
    for table in sorted(tables, key=lambda t: plan.placements[t.name] == "single"):
        placement = plan.placements[table.name]
        shard = plan.shard_of[table.name] if placement == "single" else None
        order = Addressing(table.vocabulary_size)
        rows = order.rows_per_shard(num_shards if placement == "sharded" else 1)
        offset = ends[shard or 0]
        blocks.append(TableBlock(table, placement, shard, offset, rows, order))
        for s in range(num_shards) if shard is None else [shard]:
            ends[s] = offset + rows
    return blocks, max(ends)


def _make_slab(blocks: list[TableBlock], rows: int, taken: set[str]) -> SlabLayout:
    """Names a slab and checks that its rows can be addressed."""
    spec, replicated = blocks[0].spec, blocks[0].placement == "replicated"
    rule = type(spec.optimizer).__name__.lower() if spec.trainable else "frozen"
    stored = isinstance(spec, ResidentTable)
    base = f"d{spec.embedding_dim}_{spec.dtype}_{rule}"
    base += "_replicated" * replicated + "_stored" * stored
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    if rows > MAX_ROWS_PER_SHARD:
        largest = sorted(blocks, key=lambda b: -b.rows)[:3]
        raise ValueError(
            f"slab {name!r} needs {rows:,} rows on a shard, a shard can have "
            f"{MAX_ROWS_PER_SHARD:,}; use more devices, or other placements (largest: "
            + ", ".join(f"{b.spec.name!r} {b.placement} {b.rows:,}" for b in largest)
            + ")"
        )
    return SlabLayout(
        name=name,
        dim=spec.embedding_dim,
        dtype=spec.dtype,
        optimizer=spec.optimizer,
        trainable=spec.trainable,
        replicated=replicated,
        rows_per_shard=rows,
        tables=tuple(blocks),
    )
