# SPDX-License-Identifier: Apache-2.0
"""Decides where tables go, and says what that costs before anything is allocated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax
import numpy as np
import numpy.typing as npt

from jaxsparse.layout import Layout, SlabKey, SlabLayout, TableBlock, make_layout, slab_key
from jaxsparse.optimizers import SparseOptimizer
from jaxsparse.plan_text import describe_plan, format_bytes
from jaxsparse.specs import FeatureSpec, TableSpec

REPLICATED_MAX_BYTES = 64 * 1024
"""Weights, in bytes, up to which ``auto`` replicates a table. Copies this small cost nothing in
memory and save two exchanges of rows that nearly every sample asks for."""

BYTE_KINDS = tuple(
    (placement, what)
    for placement in ("sharded", "replicated", "single")
    for what in ("weights", "slots")
)
"""What a device's bytes are counted under; ``("padding", "")`` is the rest."""

ByteKind = tuple[str, str]
PADDING: ByteKind = ("padding", "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Placements, and the bytes and load they lead to."""

    layout: Layout
    """The slabs, cut by shard."""

    placements: Mapping[str, str]
    """``sharded``, ``replicated`` or ``single`` of every table."""

    shard_of: Mapping[str, int]
    """Shard of every ``single`` table."""

    bytes_by_kind: Mapping[ByteKind, tuple[int, ...]]
    """Bytes on each device ``[num_shards]``, by (placement, ``weights`` or ``slots``) and
    ``("padding", "")``: rows that bring the slabs of all shards to the length of the fullest."""

    load: tuple[float, ...]
    """Load of each shard ``[num_shards]``, in the unit of the ``load`` given to `plan`."""

    device_bytes: int | None
    """Bytes a device can hold, None where not known."""

    @property
    def num_shards(self) -> int:
        """Number of devices."""
        return self.layout.num_shards

    @property
    def bytes_per_device(self) -> tuple[int, ...]:
        """Bytes held by each device ``[num_shards]``; equal, for slabs are padded."""
        return tuple(sum(column) for column in zip(*self.bytes_by_kind.values(), strict=True))

    @property
    def balance(self) -> float:
        """Load of the fullest shard over the mean; 1 is perfect."""
        mean = sum(self.load) / self.num_shards
        return max(self.load) / mean if mean > 0 else 1.0

    def describe(self) -> str:
        """A table in plain text: placements, bytes per device by kind, load balance."""
        return describe_plan(self)


@dataclasses.dataclass(frozen=True)
class _Assignment:
    placements: Mapping[str, str]
    shard_of: Mapping[str, int]


def plan(
    tables: Sequence[TableSpec],
    num_shards: int,
    *,
    load: Mapping[str, float] | None = None,
    device_bytes: int | None = None,
) -> Plan:
    """Places tables on shards.

    ``auto`` becomes ``replicated`` up to `REPLICATED_MAX_BYTES` of weights, else ``sharded``;
    always ``sharded`` on one device, where there is nobody to spare an exchange. Single tables
    are dealt out by falling load, each to the least loaded shard (Graham 1969: at most 4/3 of
    the best possible maximum); where that does not fit, by falling rows within each slab.

    Args:
        tables: with unique names.
        num_shards: devices of the mesh.
        load: relative work a step asks of each table, as from `load_of`; None counts one id a
            sample, so the ``embedding_dim``.
        device_bytes: bytes of a device that the tables may fill; None is no limit.

    Returns:
        The plan; nothing is allocated.

    Raises:
        ValueError: the tables cannot fit (need and have are named), a slab is too long for
            int32 rows, or an argument is malformed.

    >>> user = TableSpec("user", vocabulary_size=1_000_000, embedding_dim=16)
    >>> day = TableSpec("day", vocabulary_size=7, embedding_dim=16)
    >>> chosen = plan([user, day], 8)
    >>> dict(chosen.placements), chosen.bytes_per_device[0]
    ({'user': 'sharded', 'day': 'replicated'}, 16000896)
    """
    loads = _checked_load(tables, num_shards, load)
    placements = {t.name: _resolve(t, num_shards) for t in tables}
    singles = [t for t in tables if placements[t.name] == "single"]
    for by_rows in (False, True):
        shard_of = _deal_singles(singles, num_shards, loads, by_rows=by_rows)
        made = _evaluate(tables, num_shards, _Assignment(placements, shard_of), loads, device_bytes)
        if device_bytes is None or max(made.bytes_per_device) <= device_bytes:
            return made
    raise ValueError(_does_not_fit(made, device_bytes))


def load_of(
    features: Sequence[FeatureSpec], ids_per_sample: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Load of each table: elements its features look up per sample.

    Args:
        features: of a collection.
        ids_per_sample: mean ids in a bag, by feature name, where known; for others
            ``max_length``, or 1 without one.

    >>> item = TableSpec("item", vocabulary_size=100, embedding_dim=8)
    >>> load_of([FeatureSpec("shown", item), FeatureSpec("clicked", item)], {"clicked": 2.5})
    {'item': 28.0}
    """
    known = ids_per_sample or {}
    loads: dict[str, float] = {}
    for f in features:
        ids = known.get(f.name, f.max_length or 1)
        loads[f.table.name] = loads.get(f.table.name, 0.0) + ids * f.table.embedding_dim
    return loads


def weight_bytes(table: TableSpec, rows: int) -> int:
    """Bytes of the weights of ``rows`` rows."""
    return rows * table.embedding_dim * int(np.dtype(table.dtype).itemsize)


def slot_bytes(table: TableSpec, rows: int) -> int:
    """Bytes of the slots of ``rows`` rows, as the rule itself would make them; 0 when frozen.

    >>> slot_bytes(TableSpec("t", vocabulary_size=9, embedding_dim=16, dtype="bfloat16"), 1000)
    64000
    """
    if not table.trainable or rows == 0:
        return 0
    rule: SparseOptimizer = table.optimizer
    slots = jax.eval_shape(lambda: rule.init_slots(rows, table.embedding_dim))
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(slots))


def _resolve(table: TableSpec, num_shards: int) -> str:
    """The placement of one table, ``auto`` decided."""
    if table.placement != "auto":
        return table.placement
    small = weight_bytes(table, table.vocabulary_size) <= REPLICATED_MAX_BYTES
    return "replicated" if small and num_shards > 1 else "sharded"


def _deal_singles(
    tables: Sequence[TableSpec], num_shards: int, loads: Mapping[str, float], *, by_rows: bool
) -> dict[str, int]:
    """Shards of single tables: greedy, largest first.

    By load the rows break ties, and the other way round. Rows count per slab, because it is
    each slab's fullest shard that decides its bytes on all of them.
    """
    held = np.zeros(num_shards)
    rows_held: dict[SlabKey, npt.NDArray[np.float64]] = {}

    def size(table: TableSpec) -> tuple[float, float]:
        by_load = (loads[table.name], table.vocabulary_size)
        return by_load[::-1] if by_rows else by_load

    shard_of = {}
    for table in sorted(tables, key=size, reverse=True):
        rows = rows_held.setdefault(slab_key(table, "single"), np.zeros(num_shards))
        keys = (held, rows) if by_rows else (rows, held)  # np.lexsort: the last key leads
        shard = int(np.lexsort(keys)[0])
        held[shard] += loads[table.name]
        rows[shard] += table.vocabulary_size
        shard_of[table.name] = shard
    return {t.name: shard_of[t.name] for t in tables}


def _evaluate(
    tables: Sequence[TableSpec],
    num_shards: int,
    chosen: _Assignment,
    loads: Mapping[str, float],
    device_bytes: int | None,
) -> Plan:
    """Bytes and load of an assignment."""
    layout = make_layout(tables, num_shards, chosen)
    counted = {kind: np.zeros(num_shards, np.int64) for kind in (*BYTE_KINDS, PADDING)}
    held = np.zeros(num_shards)
    for slab in layout.slabs:
        used = np.zeros(num_shards, np.int64)
        for block in slab.tables:
            at: slice | int = slice(None) if block.shard is None else block.shard
            for what, size in zip(("weights", "slots"), _block_bytes(block), strict=True):
                counted[block.placement, what][at] += size
                used[at] += size
            share = num_shards if block.shard is None else 1
            held[at] += loads[block.spec.name] / share
        counted[PADDING] += _slab_bytes(slab) - used
    return Plan(
        layout=layout,
        placements=MappingProxyType(dict(chosen.placements)),
        shard_of=MappingProxyType(dict(chosen.shard_of)),
        bytes_by_kind=MappingProxyType({k: tuple(v.tolist()) for k, v in counted.items()}),
        load=tuple(held.tolist()),
        device_bytes=device_bytes,
    )


def _block_bytes(block: TableBlock) -> tuple[int, int]:
    """Bytes of a table's weights and slots on a shard that has it."""
    return weight_bytes(block.spec, block.rows), slot_bytes(block.spec, block.rows)


def _slab_bytes(slab: SlabLayout) -> int:
    """Bytes of a slab and its slots on each device."""
    spec, rows = slab.tables[0].spec, slab.rows_per_shard
    return weight_bytes(spec, rows) + slot_bytes(spec, rows)


def _checked_load(
    tables: Sequence[TableSpec], num_shards: int, load: Mapping[str, float] | None
) -> dict[str, float]:
    """The load of every table; checks the arguments of `plan`."""
    names = [t.name for t in tables]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"plan: table names must be unique, {twice} are not")
    if num_shards < 1:
        raise ValueError(f"plan: num_shards must be at least 1, got {num_shards}")
    if load is None:
        return {t.name: float(t.embedding_dim) for t in tables}
    if set(load) != set(names):
        raise ValueError(
            f"plan: load must name every table once: lacks {sorted(set(names) - set(load))}, "
            f"does not know {sorted(set(load) - set(names))}"
        )
    for name, value in load.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"plan: load of {name!r} must be finite and >= 0, got {value}")
    return {name: float(value) for name, value in load.items()}


def _does_not_fit(made: Plan, device_bytes: int | None) -> str:
    """Need and have of a device, and the tables that need most."""
    blocks = [block for slab in made.layout.slabs for block in slab.tables]
    sizes = sorted(((sum(_block_bytes(b)), b) for b in blocks), key=lambda pair: -pair[0])
    largest = ", ".join(
        f"{b.spec.name!r} {b.placement} {format_bytes(size)}" for size, b in sizes[:5]
    )
    need = max(made.bytes_per_device)
    return (
        f"plan: the tables do not fit: each of the {made.num_shards} devices needs "
        f"{format_bytes(need)} ({need:,} bytes) and has {format_bytes(device_bytes or 0)} "
        f"({device_bytes:,} bytes); largest on a device: {largest}. "
        "Use more devices, smaller tables or dims, bfloat16, or a rule with fewer slots."
    )
