# SPDX-License-Identifier: Apache-2.0
"""`PackedIds`: what crosses the door from host to device, plain arrays and static sizes.

In shapes below N is the number of devices, S the number of owners a device asks (N for a routed
slab, 1 for a replicated one), C the capacity, b = B' / N the samples of a device. Every array but
``value_slots`` is cut along its first dimension over the whole mesh.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxsparse.bag_plan import BagPlan, LevelPlan
from jaxsparse.hashing import Hashed
from jaxsparse.ladder import SlabNeed


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "rows",
        "inverse",
        "plan",
        "weights",
        "value_slots",
    ),
    meta_fields=("capacity", "fixed", "ragged"),
)
@dataclasses.dataclass(frozen=True)
class SlabIds:
    """Ids of all features that look up one slab.

    A device's M ids are those of the fixed features, feature by feature, then ``M'`` of the
    ragged ones, padded.
    """

    rows: jax.Array
    """``[N * S * C]`` int32: distinct local rows wanted of each owner, ascending, padded with R."""
    inverse: jax.Array
    """``[N * M]`` int32: index of each id's row among the ``S * C``; ``S * C`` for padding."""
    plan: LevelPlan | BagPlan
    """How ids are summed into bags, and gradients into distinct rows."""
    weights: jax.Array | None
    """``[N * M']`` float32 per-id weights, None where no ragged feature has any."""
    value_slots: dict[str, jax.Array]
    """Per weighted feature, int32 index into ``[N * M']`` of each of the user's values, padded
    and out of range where the value was dropped; empty in several processes."""
    capacity: int
    """C."""
    fixed: tuple[tuple[str, int], ...]
    """Features with a fixed number of ids per sample, and that number."""
    ragged: tuple[str, ...]
    """The other features, in buffer order."""


@dataclasses.dataclass(frozen=True)
class HostFacts:
    """What `pack` knows about a batch that no compiled program may depend on."""

    num_samples: int
    needs: tuple[SlabNeed, ...]
    ignored: dict[str, int]
    """Keys outside an ``Identity(out_of_range="ignore")`` table, by feature."""
    num_values: dict[str, int]
    """Values the user gave, by weighted feature."""
    value_slots: tuple[dict[str, Any], ...] = ()
    """In several processes: `SlabIds.value_slots` by slab, of this process's values into its part
    of the buffers; the arrays have none then, since each process has its own."""


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class PackedIds:
    """One batch of ids, deduplicated and addressed; made by `EmbeddingCollection.pack`.

    A pytree: pass it to any jit. Capacities are static, so a program compiled for one rung is
    never run with ids of another.
    """

    slabs: tuple[SlabIds, ...]
    """By slab of the layout."""
    lengths_by_feature: jax.Array
    """``[B', F]`` int32."""
    feature_names: tuple[str, ...]
    """Static: columns of ``lengths_by_feature``."""
    rows_per_shard: tuple[int, ...]
    """Static: R of each slab; ids addressed for one layout must not meet another."""
    key_rules: tuple[Hashed | None, ...]
    """Static, by feature: the rule that hashed its keys, None where keys are rows."""
    host: HostFacts | None = None
    """None once the ids have passed through jit."""

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
        """Children and static part; ``host`` is left behind on purpose."""
        static = (self.feature_names, self.rows_per_shard, self.key_rules)
        return (self.slabs, self.lengths_by_feature), static

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, Any, Any], children: tuple[Any, Any]) -> PackedIds:
        """Inverse of `tree_flatten`."""
        slabs, lengths = children
        return cls(slabs, lengths, *static)

    @property
    def padded_samples(self) -> int:
        """B': samples including padding (per device inside ``shard_map``)."""
        return int(self.lengths_by_feature.shape[0])

    def lengths(self, feature: str) -> jax.Array:
        """Bag lengths ``[B']`` int32 after truncation; 0 for padded samples.

        For an unpooled feature the length is the position after the bag's last id.
        """
        if feature not in self.feature_names:
            raise ValueError(f"no feature {feature!r} here; features: {list(self.feature_names)}")
        return self.lengths_by_feature[:, self.feature_names.index(feature)]

    @property
    def rung(self) -> int:
        """Largest capacity over slabs, in rows per (source, owner)."""
        return max((slab.capacity for slab in self.slabs), default=0)

    @property
    def num_samples(self) -> int:
        """B: samples the user gave to this process."""
        return self._host_facts().num_samples

    @property
    def need(self) -> int:
        """Most distinct rows any device asks of any owner, over slabs."""
        return max((need.rows for need in self._host_facts().needs), default=0)

    @property
    def ignored(self) -> dict[str, int]:
        """Keys that ``Identity(out_of_range="ignore")`` let pass without a row, by feature."""
        return dict(self._host_facts().ignored)

    def with_local_value_slots(self) -> PackedIds:
        """The same, ``value_slots`` moved to the host: for meshes of several processes."""
        slots = tuple(slab.value_slots for slab in self.slabs)
        slabs = tuple(dataclasses.replace(slab, value_slots={}) for slab in self.slabs)
        host = dataclasses.replace(self._host_facts(), value_slots=slots)
        return dataclasses.replace(self, slabs=slabs, host=host)

    def _host_facts(self) -> HostFacts:
        if self.host is None:
            raise ValueError(
                "these PackedIds have passed through jit and know only their arrays; "
                "ask the object that pack returned"
            )
        return self.host

    def spec(self, axes: tuple[str, ...]) -> PackedIds:
        """PartitionSpecs of all arrays, for `jax.shard_map` over ``axes``."""
        cut: Any = PartitionSpec(axes)
        whole = PartitionSpec()

        def slab_spec(slab: SlabIds) -> SlabIds:
            spec: SlabIds = jax.tree.map(lambda _: cut, slab)
            slots = jax.tree.map(lambda _: whole, slab.value_slots)
            return dataclasses.replace(spec, value_slots=slots)

        slabs = tuple(map(slab_spec, self.slabs))
        return PackedIds(slabs, cut, self.feature_names, self.rows_per_shard, self.key_rules)
