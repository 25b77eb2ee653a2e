# SPDX-License-Identifier: Apache-2.0
"""From a raw batch to `PackedIds`, on the host: dedup, bucketing by owner, static sizes.

Everything is pure numpy and per process. The capacity must be known before the program runs, and
it is the exact number of distinct rows per (source, owner): so the dedup is done here once and
shipped, and devices neither sort nor count ids they ask for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.bag_plan import BagPlan, LevelPlan, offsets_of
from jaxsparse.encode import NOTHING, FixedIds, RaggedIds
from jaxsparse.ladder import SlabNeed, SlabShape, bucket
from jaxsparse.layout import SlabLayout
from jaxsparse.ops.paths import Path
from jaxsparse.ops.segment_sum import plan_levels
from jaxsparse.packed import SlabIds
from jaxsparse.specs import FeatureSpec

Int64s = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Distinct:
    """The distinct codes of one device and slab."""

    order: Int64s
    """``[n]``: buffer positions of real ids, grouped by code."""
    codes: Int64s
    """``[U]``, ascending, hence grouped by owner."""
    counts: Int64s
    """``[U]``: ids of each code."""
    bounds: Int64s
    """``[S + 1]``: first code of each owner."""


def distinct(codes: Int64s, num_owners: int, rows_per_shard: int) -> Distinct:
    """Groups equal codes, leaving out NOTHING.

    >>> found = distinct(np.array([7, -1, 2, 7]), num_owners=2, rows_per_shard=5)
    >>> found.codes, found.counts, found.order, found.bounds
    (array([2, 7]), array([1, 2]), array([2, 0, 3]), array([0, 1, 2]))
    """
    index_bits = codes.size.bit_length()
    if (num_owners * rows_per_shard).bit_length() + index_bits < 64:
        # One sort of (code, index) in a single word is several times faster than an argsort.
        packed = (codes << index_bits) | np.arange(codes.size)
        packed.sort()
        packed = packed[np.searchsorted(packed, 0) :]
        order, ordered = packed & ((1 << index_bits) - 1), packed >> index_bits
    else:
        order = np.argsort(codes, kind="stable")
        order = order[np.searchsorted(codes[order], 0) :]
        ordered = codes[order]
    heads = np.flatnonzero(np.diff(ordered, prepend=NOTHING))
    found = ordered[heads]
    counts = np.diff(heads, append=ordered.size)
    bounds = np.searchsorted(found, np.arange(num_owners + 1) * rows_per_shard)
    return Distinct(order, found, counts, bounds)


@dataclasses.dataclass
class SlabBatch:
    """One slab's ids of one batch, before sizes are chosen."""

    slab: SlabLayout
    num_shards: int
    """Devices of the mesh."""
    num_devices: int
    """Those of this process: the ones its ids are laid out for."""
    samples: int
    """b: samples per device."""
    fixed: dict[str, FixedIds]
    ragged: dict[str, RaggedIds]
    specs: Mapping[str, FeatureSpec]

    def __post_init__(self) -> None:
        """Lays the ids out by device and groups equal ones."""
        self.num_owners = 1 if self.slab.replicated else self.num_shards
        columns = [
            _by_device(ids.codes, self.num_devices, self.samples) for ids in self.fixed.values()
        ]
        self.fixed_ids = sum(column.shape[1] for column in columns)
        # Ragged ids of device d: every feature's values between two sample boundaries.
        borders = np.arange(self.num_devices + 1) * self.samples
        self.cuts = {name: np.searchsorted(r.sample, borders) for name, r in self.ragged.items()}
        counts = sum((np.diff(c) for c in self.cuts.values()), np.zeros(self.num_devices, np.int64))
        self.ragged_ids = int(counts.max(initial=0))
        codes = np.full((self.num_devices, self.fixed_ids + self.ragged_ids), NOTHING, np.int64)
        if columns:
            codes[:, : self.fixed_ids] = np.concatenate(columns, axis=1)
        self.scatter_ragged(codes[:, self.fixed_ids :], lambda ids, values: ids.codes[values])
        rows = self.slab.rows_per_shard
        self.found = [distinct(device, self.num_owners, rows) for device in codes]

    def need(self) -> SlabNeed:
        """What the batch needs of this slab."""
        rows = max((int(np.diff(f.bounds).max(initial=0)) for f in self.found), default=0)
        return SlabNeed(self.fixed_ids, self.ragged_ids, rows)

    def scatter_ragged(
        self,
        out: npt.NDArray[Any],
        values_of: Callable[[RaggedIds, slice], npt.NDArray[Any]],
    ) -> None:
        """Writes one value per ragged id into ``out [num_devices, >= ragged_ids]``."""
        for device in range(self.num_devices):
            start = 0
            for name, ids in self.ragged.items():
                values = slice(*self.cuts[name][device : device + 2])
                stop = start + values.stop - values.start
                out[device, start:stop] = values_of(ids, values)
                start = stop

    def pack(self, shape: SlabShape, path: Path) -> SlabIds:
        """The arrays of the chosen sizes, devices stacked along the first dimension.

        Args:
            shape: the sizes.
            path: which implementations will read them.
        """
        num_ids = self.fixed_ids + shape.ragged_ids
        num_rows = self.num_owners * shape.capacity
        rows = np.full((self.num_devices, num_rows), self.slab.rows_per_shard, np.int32)
        inverse = np.full((self.num_devices, num_ids), num_rows, np.int32)
        slots = []
        for device, found in enumerate(self.found):
            owner = np.repeat(np.arange(self.num_owners), np.diff(found.bounds))
            slots.append(owner * shape.capacity + np.arange(owner.size) - found.bounds[owner])
            rows[device, slots[-1]] = found.codes - owner * self.slab.rows_per_shard
            inverse[device, found.order] = np.repeat(slots[-1], found.counts)
        weights = None
        if any(ids.weights is not None for ids in self.ragged.values()):
            weights = np.zeros((self.num_devices, shape.ragged_ids), np.float32)
            self.scatter_ragged(weights, _weights_or_ones)
        bag = self._bags(shape.ragged_ids)
        plan = self._level_plan if path == "xla" else self._bag_plan
        # Numpy here, global arrays once shipped: the container is the same.
        arrays: dict[str, Any] = dict(
            rows=rows.reshape(-1),
            inverse=inverse.reshape(-1),
            plan=plan(bag, slots, num_rows, weights is not None),
            weights=None if weights is None else weights.reshape(-1),
            value_slots=self._value_slots(shape.ragged_ids),
        )
        return SlabIds(
            **arrays,
            capacity=shape.capacity,
            fixed=tuple((name, ids.codes.shape[1]) for name, ids in self.fixed.items()),
            ragged=tuple(self.ragged),
        )

    def _num_bags(self, names: Iterable[str]) -> int:
        return sum(self.samples * bag_width(self.specs[name]) for name in names)

    def _bags(self, buffer: int) -> npt.NDArray[np.int32]:
        """``[num_devices, buffer]``: bag of each ragged id from the first ragged bag on."""
        bag = np.full((self.num_devices, buffer), self._num_bags(self.ragged), np.int32)
        for device in range(self.num_devices):
            start = base = 0
            for name, ids in self.ragged.items():
                values = slice(*self.cuts[name][device : device + 2])
                stop = start + values.stop - values.start
                local = ids.sample[values] - device * self.samples
                if self.specs[name].combiner is None:
                    local = local * bag_width(self.specs[name]) + ids.position[values]
                bag[device, start:stop] = base + local
                start, base = stop, base + self._num_bags([name])
        return bag

    def _level_plan(
        self, bag: npt.NDArray[np.int32], slots: list[Int64s], num_rows: int, weighted: bool
    ) -> LevelPlan:
        del weighted  # scatters read weights in the order of ids
        num_ids = self.fixed_ids + bag.shape[1]
        num_bags = self._num_bags(self.ragged)
        row_levels = [
            plan_levels(found.counts, places, found.order, num_ids, num_rows)
            for found, places in zip(self.found, slots, strict=True)
        ]
        bag_levels = []
        for bags in bag:
            present, counts = np.unique(bags[bags < num_bags], return_counts=True)
            bag_levels.append(plan_levels(counts, present, None, bags.size, num_bags))
        arrays: dict[str, Any] = dict(bag=bag.reshape(-1), bag_levels=_stack(bag_levels))
        return LevelPlan(row_levels=_stack(row_levels), **arrays)

    def _bag_plan(
        self, bag: npt.NDArray[np.int32], slots: list[Int64s], num_rows: int, weighted: bool
    ) -> BagPlan:
        bags, is_plain = self._fixed_bags()
        num_fixed = self._num_bags(self.fixed)
        num_bags = num_fixed + self._num_bags(self.ragged)
        num_ids = self.fixed_ids + bag.shape[1]
        row_offsets, row_bags, row_ids, bag_offsets = [], [], [], []
        for ragged, found, places in zip(bag, self.found, slots, strict=True):
            bag_of = np.concatenate([bags, num_fixed + ragged])
            counts = np.zeros(num_rows, np.int64)
            counts[places] = found.counts
            padding = num_ids - found.order.size
            row_offsets.append(offsets_of(counts))
            row_bags.append(np.pad(bag_of[found.order], (0, padding), constant_values=num_bags))
            row_ids.append(np.pad(found.order, (0, padding), constant_values=num_ids))
            bag_offsets.append(offsets_of(np.bincount(bag_of, minlength=num_bags)[:num_bags]))
        arrays: dict[str, Any] = dict(
            bag_offsets=None if is_plain else np.concatenate(bag_offsets),
            row_offsets=np.concatenate(row_offsets),
            row_bags=np.concatenate(row_bags).astype(np.int32),
            row_ids=np.concatenate(row_ids).astype(np.int32) if weighted else None,
        )
        return BagPlan(**arrays)

    def _fixed_bags(self) -> tuple[Int64s, bool]:
        """Bag of each fixed id, and whether every bag of the slab is one id."""
        bags, base, is_plain = [np.empty(0, np.int64)], 0, not self.ragged
        for name, ids in self.fixed.items():
            num_ids, width = ids.codes.shape[1], bag_width(self.specs[name])
            sample = np.arange(self.samples)[:, None]
            position = np.arange(num_ids) if self.specs[name].combiner is None else 0
            bags.append(np.ravel(base + sample * width + position + np.zeros(num_ids, np.int64)))
            base += self.samples * width
            is_plain &= num_ids == width
        return np.concatenate(bags), is_plain

    def _value_slots(self, buffer: int) -> dict[str, npt.NDArray[np.int32]]:
        slots = {
            name: np.full(bucket(ids.num_values), self.num_devices * buffer, np.int32)
            for name, ids in self.ragged.items()
            if ids.weights is not None
        }
        for device in range(self.num_devices):
            start = device * buffer
            for name, ids in self.ragged.items():
                values = ids.value_index[slice(*self.cuts[name][device : device + 2])]
                if name in slots:
                    slots[name][values] = start + np.arange(values.size)
                start += values.size
        return slots


def bag_width(spec: FeatureSpec) -> int:
    """Vectors one ragged bag of this feature becomes."""
    return 1 if spec.combiner is not None else int(spec.max_length or 0)


def _weights_or_ones(ids: RaggedIds, values: slice) -> npt.NDArray[np.float32]:
    if ids.weights is None:
        return np.ones(values.stop - values.start, np.float32)
    return ids.weights[values]


def _stack(levels: Sequence[tuple[npt.NDArray[np.int32], ...]]) -> tuple[Any, ...]:
    return tuple(np.concatenate(level) for level in zip(*levels, strict=True))


def _by_device(codes: Int64s, num_devices: int, samples: int) -> Int64s:
    """``[B, L]`` to ``[num_devices, samples * L]``, padded with NOTHING."""
    padded = np.full((num_devices * samples, codes.shape[1]), NOTHING, np.int64)
    padded[: codes.shape[0]] = codes
    return padded.reshape(num_devices, samples * codes.shape[1])
