# SPDX-License-Identifier: Apache-2.0
"""`PreparedIds`: a process's batch, addressed and deduplicated, before sizes are chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.encode import FixedIds, RaggedIds, num_bags
from jaxsparse.hashing import Hashed
from jaxsparse.ladder import SlabNeed, SlabShape
from jaxsparse.layout import SlabLayout
from jaxsparse.ops.packing import fill_lengths
from jaxsparse.ops.paths import Path
from jaxsparse.packed import HostFacts, PackedIds
from jaxsparse.packing import SlabBatch
from jaxsparse.slab_encoder import SlabEncoder
from jaxsparse.specs import FeatureSpec


@dataclasses.dataclass(frozen=True)
class SlabFeatures:
    """One slab's features of one batch, addressed; not yet laid out by device."""

    slab: SlabLayout
    fixed: dict[str, FixedIds]
    ragged: dict[str, RaggedIds]


@dataclasses.dataclass(frozen=True)
class PreparedIds:
    """A process's batch, addressed and deduplicated: all of `pack` but sizes and shipping."""

    specs: Mapping[str, FeatureSpec]
    features: tuple[SlabFeatures, ...]
    """By slab."""
    num_shards: int
    """Devices of the mesh."""
    num_devices: int
    """Those of this process."""
    num_samples: int
    """B: the process's real samples."""
    batches: tuple[SlabBatch, ...]
    """By slab."""

    @property
    def samples(self) -> int:
        """b: samples per device, padding included."""
        return self.batches[0].samples

    def needs(self) -> tuple[SlabNeed, ...]:
        """What this process's devices need, by slab."""
        return tuple(batch.need() for batch in self.batches)

    def with_samples(self, samples: int) -> PreparedIds:
        """The batch laid out with ``samples`` per device, at least as many as it needs."""
        if samples == self.samples:
            return self
        batches = _lay_out(self.features, self.num_shards, self.num_devices, samples, self.specs)
        return dataclasses.replace(self, batches=batches)

    def pack(
        self, shapes: Sequence[SlabShape], needs: tuple[SlabNeed, ...], path: Path
    ) -> PackedIds:
        """Numpy arrays of the given sizes, devices stacked along the first dimension.

        Args:
            shapes: sizes by slab.
            needs: what they were chosen from; told by `PackedIds.need`.
            path: which implementations will read the arrays.
        """
        batches = zip(self.batches, shapes, strict=True)
        packed = tuple(batch.pack(shape, path) for batch, shape in batches)
        lengths: dict[str, npt.NDArray[np.int64] | int] = {}
        ignored, num_values = {}, {}
        for part in self.features:
            lengths |= {name: fixed.codes.shape[1] for name, fixed in part.fixed.items()}
            for name, ragged in part.ragged.items():
                lengths[name] = ragged.lengths
                if ragged.ignored:
                    ignored[name] = ragged.ignored
                if ragged.weights is not None:
                    num_values[name] = ragged.num_values
        padded_samples = self.samples * self.num_devices
        by_feature = [lengths[name] for name in self.specs]
        shipped_later: Any = fill_lengths(by_feature, self.num_samples, padded_samples)
        host = HostFacts(self.num_samples, needs, ignored, num_values)
        rows = tuple(part.slab.rows_per_shard for part in self.features)
        rules = key_rules(self.specs.values())
        return PackedIds(packed, shipped_later, tuple(self.specs), rows, rules, host)


def key_rules(specs: Iterable[FeatureSpec]) -> tuple[Hashed | None, ...]:
    """How keys of each feature become rows: by hash, or None where they are rows."""
    rules = [spec.table.keys for spec in specs]
    return tuple(rule if isinstance(rule, Hashed) else None for rule in rules)


def prepare_ids(
    specs: Mapping[str, FeatureSpec],
    encoders: Sequence[SlabEncoder],
    num_devices: int,
    features: Mapping[str, Any],
    addressed: Mapping[str, FixedIds | RaggedIds],
) -> PreparedIds:
    """Checks, addresses and deduplicates a process's batch.

    Args:
        specs: the collection's features by name.
        encoders: those of its slabs.
        num_devices: devices of this process, over which its samples are spread.
        features: keys by feature.
        addressed: ids of the features of stored slabs.
    """
    num_samples = check_features(specs, features)
    parts = []
    for encoder in encoders:
        part = SlabFeatures(encoder.slab, {}, {})
        if encoder.slab.is_stored:
            by_name = {spec.name: addressed[spec.name] for spec in encoder.specs}
        else:
            by_name = encoder.encode(features)
        for name, ids in by_name.items():
            if isinstance(ids, FixedIds):
                part.fixed[name] = ids
            else:
                part.ragged[name] = ids
        parts.append(part)
    samples = -(-num_samples // num_devices)
    num_shards = encoders[0].num_shards
    batches = _lay_out(parts, num_shards, num_devices, samples, specs)
    return PreparedIds(specs, tuple(parts), num_shards, num_devices, num_samples, batches)


def _lay_out(
    parts: Sequence[SlabFeatures],
    num_shards: int,
    num_devices: int,
    samples: int,
    specs: Mapping[str, FeatureSpec],
) -> tuple[SlabBatch, ...]:
    return tuple(
        SlabBatch(part.slab, num_shards, num_devices, samples, part.fixed, part.ragged, specs)
        for part in parts
    )


def check_features(specs: Mapping[str, FeatureSpec], features: Mapping[str, Any]) -> int:
    """Number of samples; raises where names or lengths do not agree."""
    names = list(specs)
    missing = [name for name in names if name not in features]
    unknown = [name for name in features if name not in specs]
    if missing or unknown:
        raise ValueError(
            f"features do not match the collection: missing {missing}, unknown {unknown}; "
            f"expected exactly {names}"
        )
    sizes = {name: num_bags(name, features[name]) for name in names}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"features must have equally many samples, got {sizes}")
    return next(iter(sizes.values()))
