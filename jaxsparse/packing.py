# SPDX-License-Identifier: Apache-2.0
"""From a raw batch to `PackedIds`, on the host: dedup, bucketing by owner, static sizes.

Everything is per process and without JAX. The capacity must be known before the program runs, and
it is the exact number of distinct rows per (source, owner): so the dedup is done here once and
shipped, and devices neither sort nor count ids they ask for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.bag_plan import BagPlan, LevelPlan
from jaxsparse.encode import FixedIds, RaggedIds
from jaxsparse.ladder import SlabNeed, SlabShape, bucket
from jaxsparse.layout import SlabLayout
from jaxsparse.ops.packing import (
    DeviceIds,
    RowArrays,
    SlabFeature,
    distinct,
    fill_bags,
    fill_rows,
    group,
)
from jaxsparse.ops.paths import Path
from jaxsparse.ops.segment_sum import plan_levels
from jaxsparse.packed import SlabIds
from jaxsparse.specs import FeatureSpec

__all__ = ["SlabBatch", "bag_width", "distinct"]

Int32s = npt.NDArray[np.int32]


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
        self.ids = self._by_device()
        self.fixed_ids = int(self.ids.places[0, len(self.fixed)])
        self.ragged_ids = self.ids.num_places - self.fixed_ids
        self.grouped = group(self.ids)

    def need(self) -> SlabNeed:
        """What the batch needs of this slab."""
        rows = int(np.diff(self.grouped.bounds).max(initial=0))
        return SlabNeed(self.fixed_ids, self.ragged_ids, rows)

    def pack(self, shape: SlabShape, path: Path) -> SlabIds:
        """The arrays of the chosen sizes, devices stacked along the first dimension.

        Args:
            shape: the sizes.
            path: which implementations will read them.
        """
        num_ids = self.fixed_ids + shape.ragged_ids
        bag_of = bag_offsets = None
        if not self._is_plain:
            bag_of, bag_offsets = fill_bags(self.ids, num_ids)
        weights = self._weights(shape.ragged_ids)
        by_row = fill_rows(
            self.ids, self.grouped, num_ids, shape.capacity, bag_of, weights is not None
        )
        # Numpy here, global arrays once shipped: the container is the same.
        arrays: dict[str, Any] = dict(
            rows=by_row.rows.reshape(-1),
            inverse=by_row.inverse.reshape(-1),
            plan=_bag_plan(by_row, bag_offsets)
            if path != "xla"
            else self._level_plan(bag_of, num_ids, shape.capacity),
            weights=weights,
            value_slots=self._value_slots(shape.ragged_ids),
        )
        return SlabIds(
            **arrays,
            capacity=shape.capacity,
            fixed=tuple((name, ids.codes.shape[1]) for name, ids in self.fixed.items()),
            ragged=tuple(self.ragged),
        )

    def _by_device(self) -> DeviceIds:
        tables = {block.spec.name: index for index, block in enumerate(self.slab.tables)}
        features = [
            _slab_feature(self.specs[name], tables, ids)
            for name, ids in (self.fixed | self.ragged).items()
        ]
        sizes = [len(ids.codes) for ids in self.fixed.values()]
        sizes += [ids.lengths.size for ids in self.ragged.values()]
        # Samples of device d lie between borders d and d + 1; the last ones may have none.
        borders = np.minimum(np.arange(self.num_devices + 1) * self.samples, sizes[0])
        cuts = np.empty((len(features), self.num_devices + 1), np.int64)
        widths = [feature.num_ids for feature in features[: len(self.fixed)]]
        cuts[: len(self.fixed)] = np.array(widths, np.int64)[:, None] * borders
        for number, ids in enumerate(self.ragged.values(), len(self.fixed)):
            cuts[number] = ids.splits[borders]
        places = np.zeros((self.num_devices, len(features) + 1), np.int64)
        counts = np.diff(cuts).T
        # Padded samples of a fixed feature have places, too.
        counts[:, : len(self.fixed)] = np.array(widths, np.int64) * self.samples
        np.cumsum(counts, axis=1, out=places[:, 1:])
        return DeviceIds(
            features=tuple(features),
            num_devices=self.num_devices,
            num_owners=1 if self.slab.replicated else self.num_shards,
            rows_per_shard=self.slab.rows_per_shard,
            samples=self.samples,
            num_samples=sizes[0],
            cuts=cuts,
            places=places,
        )

    @property
    def _is_plain(self) -> bool:
        """Whether every bag of the slab is one id, so that bag o is id o."""
        features = self.ids.features
        return not self.ragged and all(part.num_ids == part.width for part in features)

    def _level_plan(self, bag_of: Int32s | None, num_ids: int, capacity: int) -> LevelPlan:
        num_rows = self.ids.num_owners * capacity
        row_levels = []
        for device in range(self.num_devices):
            found = self.grouped.of(device)
            owner = np.repeat(np.arange(self.ids.num_owners), np.diff(found.bounds))
            slots = owner * capacity + np.arange(owner.size) - found.bounds[owner]
            row_levels.append(plan_levels(found.counts, slots, found.order, num_ids, num_rows))
        fixed_bags = self.samples * sum(f.width for f in self.ids.features[: len(self.fixed)])
        num_bags = self.ids.num_bags - fixed_bags
        if bag_of is None:
            bag_of = np.empty((self.num_devices, self.fixed_ids), np.int32)
        bag = bag_of[:, self.fixed_ids :] - np.int32(fixed_bags)
        bag_levels = []
        for bags in bag:
            present, counts = np.unique(bags[bags < num_bags], return_counts=True)
            bag_levels.append(plan_levels(counts, present, None, bags.size, num_bags))
        arrays: dict[str, Any] = dict(bag=bag.reshape(-1), bag_levels=_stack(bag_levels))
        return LevelPlan(row_levels=_stack(row_levels), **arrays)

    def _weights(self, buffer: int) -> npt.NDArray[np.float32] | None:
        """Weight of each ragged id ``[num_devices * buffer]``, 1 where its feature has none."""
        if all(ids.weights is None for ids in self.ragged.values()):
            return None
        weights = np.zeros((self.num_devices, buffer), np.float32)
        for device in range(self.num_devices):
            for number, ids in enumerate(self.ragged.values(), len(self.fixed)):
                values = slice(*self.ids.cuts[number, device : device + 2])
                place = self.ids.places[device, number : number + 2] - self.fixed_ids
                weights[device, slice(*place)] = 1 if ids.weights is None else ids.weights[values]
        return weights.reshape(-1)

    def _value_slots(self, buffer: int) -> dict[str, Int32s]:
        slots = {}
        for number, (name, ids) in enumerate(self.ragged.items(), len(self.fixed)):
            if ids.weights is None:
                continue
            slots[name] = np.full(bucket(ids.num_values), self.num_devices * buffer, np.int32)
            for device in range(self.num_devices):
                values = ids.value_index[slice(*self.ids.cuts[number, device : device + 2])]
                start = device * buffer + self.ids.places[device, number] - self.fixed_ids
                slots[name][values] = start + np.arange(values.size)
        return slots


def bag_width(spec: FeatureSpec) -> int:
    """Vectors one ragged bag of this feature becomes."""
    return 1 if spec.combiner is not None else int(spec.max_length or 0)


def _slab_feature(
    spec: FeatureSpec, tables: Mapping[str, int], ids: FixedIds | RaggedIds
) -> SlabFeature:
    common = tables[spec.table.name], bag_width(spec), spec.combiner is None
    if isinstance(ids, FixedIds):
        return SlabFeature(ids.codes.reshape(-1), *common, ids.codes.shape[1])
    return SlabFeature(ids.codes, *common, None, ids.splits, ids.given_position)


def _bag_plan(by_row: RowArrays, bag_offsets: Int32s | None) -> BagPlan:
    arrays: dict[str, Any] = dict(
        bag_offsets=None if bag_offsets is None else bag_offsets.reshape(-1),
        row_offsets=by_row.row_offsets.reshape(-1),
        row_bags=by_row.row_bags.reshape(-1),
        row_ids=None if by_row.row_ids is None else by_row.row_ids.reshape(-1),
    )
    return BagPlan(**arrays)


def _stack(levels: Sequence[tuple[Int32s, ...]]) -> tuple[Any, ...]:
    return tuple(np.concatenate(level) for level in zip(*levels, strict=True))
