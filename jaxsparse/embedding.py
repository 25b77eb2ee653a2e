# SPDX-License-Identifier: Apache-2.0
"""`EmbeddingCollection`: the tables of a model on a mesh, as pure functions of their state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from jaxsparse import checks, programs, table_rows
from jaxsparse.agreement import agree
from jaxsparse.encode import FixedIds, RaggedIds
from jaxsparse.hashing import Hashed
from jaxsparse.ladder import Ladder, SlabNeed, SlabShape, smallest_shape
from jaxsparse.layout import Layout
from jaxsparse.local import LocalEmbedding, Residuals
from jaxsparse.ops.paths import Path, path_of
from jaxsparse.optimizers import rate_of
from jaxsparse.packed import PackedIds
from jaxsparse.packing import bag_width
from jaxsparse.plan_text import counted
from jaxsparse.planner import Plan, load_of, plan
from jaxsparse.pooling import Activations
from jaxsparse.prepared import PreparedIds, key_rules, prepare_ids
from jaxsparse.processes import is_shared, local_block, local_devices, put_blocks
from jaxsparse.resident import resident_feature
from jaxsparse.row_grads import RowGrads
from jaxsparse.slab_encoder import SlabEncoder
from jaxsparse.specs import Exchange, FeatureSpec, TableSpec, is_positive_int
from jaxsparse.state import EmbeddingState, state_spec


@dataclasses.dataclass(frozen=True, eq=False)
class EmbeddingCollection:
    """Embedding tables sharded over a mesh, looked up and updated exactly.

    The collection is frozen and hashable and holds no array: every method takes a state and
    returns one. ``lookup``, ``row_grads``, ``update``, ``apply`` and ``weight_grads`` work on
    global arrays, eagerly or inside jit; ``local`` has the same on per-device blocks. Eager calls
    of ``update``, ``apply`` and ``write`` donate the state they are given.

    >>> item = TableSpec("item", vocabulary_size=10, embedding_dim=4)
    >>> emb = EmbeddingCollection([FeatureSpec("clicked", item)], mesh=jax.make_mesh(
    ...     (1,), ("shard",), axis_types=(jax.sharding.AxisType.Auto,)))
    >>> state = emb.init(jax.random.key(0))
    >>> acts, res = emb.lookup(state, emb.pack({"clicked": np.array([3, 3])}))
    >>> acts["clicked"].shape
    (2, 4)
    >>> state = emb.update(state, res, acts, step=0)
    """

    features: Sequence[FeatureSpec]
    """Features; those that name the same table share it."""

    _: dataclasses.KW_ONLY

    mesh: Mesh
    """Rows and samples are cut over all its axes, flattened in order."""

    exchange: Exchange = Exchange()
    """How rows travel."""

    device_bytes: int | None = None
    """Memory the tables may take per device, in bytes; None asks the device, if it knows."""

    def __post_init__(self) -> None:
        """Validates the features and normalises them to a tuple."""
        checks.check_mesh(self.mesh)
        object.__setattr__(self, "features", tuple(self.features))
        if not self.features:
            raise ValueError("EmbeddingCollection: features is empty, expected at least one")
        names = [feature.name for feature in self.features]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"EmbeddingCollection: feature names must be unique, twice: {twice}")
        for feature in self.features:
            first, other = self.tables[feature.table.name], feature.table
            # Rules may leave the rate out of comparison.
            same_rate = rate_of(first.optimizer) == rate_of(other.optimizer)
            if first != other or not same_rate:
                raise ValueError(
                    f"EmbeddingCollection: two different tables are named "
                    f"{other.name!r}: {first} and {other}"
                )

        for table in self.tables.values():
            if table.trainable:
                checks.check_rule(table.name, table.optimizer, table.embedding_dim)

    @functools.cached_property
    def _identity(self) -> Hashable:
        # Float learning rates live in the state; schedules are part of the program.
        rates = (rate_of(table.optimizer) for table in self.tables.values())
        schedules = tuple(rate if callable(rate) else None for rate in rates)
        return self.features, schedules, self.mesh, self.exchange, self.device_bytes, self.path

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._identity)

    def __hash__(self) -> int:
        """Hash of the specs without float learning rates, computed once."""
        return self._hash

    def __eq__(self, other: object) -> bool:
        """Whether both compile to the same programs."""
        if not isinstance(other, EmbeddingCollection):
            return NotImplemented
        return self is other or (self._hash == other._hash and self._identity == other._identity)

    @functools.cached_property
    def tables(self) -> dict[str, TableSpec]:
        """Tables by name, in the order features name them."""
        tables: dict[str, TableSpec] = {}
        for feature in self.features:
            tables.setdefault(feature.table.name, feature.table)
        return tables

    @functools.cached_property
    def feature_specs(self) -> dict[str, FeatureSpec]:
        """Features by name."""
        return {feature.name: feature for feature in self.features}

    @functools.cached_property
    def stored_tables(self) -> dict[str, TableSpec]:
        """Tables of Dynamic keys or with tiers, by name: a row store brings in their rows."""
        return {name: table for name, table in self.tables.items() if table.is_stored}

    @functools.cached_property
    def resident_features(self) -> dict[str, FeatureSpec]:
        """Features by name, with tables as the devices see them (`resident.resident_table`)."""
        return {feature.name: resident_feature(feature) for feature in self.features}

    @functools.cached_property
    def _key_rules(self) -> tuple[Hashed | None, ...]:
        return key_rules(self.resident_features.values())

    @functools.cached_property
    def _encoders(self) -> tuple[SlabEncoder, ...]:
        encoders = []
        for slab in self.layout.slabs:
            tables = {block.spec.name for block in slab.tables}
            features = self.resident_features.values()
            specs = tuple(spec for spec in features if spec.table.name in tables)
            encoders.append(SlabEncoder(slab, specs, self.num_shards))
        return tuple(encoders)

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes, in order."""
        return tuple(str(name) for name in self.mesh.axis_names)

    @property
    def num_shards(self) -> int:
        """Devices of the mesh."""
        return int(self.mesh.devices.size)

    @functools.cached_property
    def plan(self) -> Plan:
        """Placement of every table."""
        limit = self.device_bytes
        if limit is None:
            told = [device.memory_stats() for device in self.mesh.local_devices[:1]]
            limit = told[0].get("bytes_limit") if told and told[0] else None
        tables = {spec.table.name: spec.table for spec in self.resident_features.values()}
        return plan(
            [tables[name] for name in self.tables],
            self.num_shards,
            load=load_of(self.features),
            device_bytes=limit,
        )

    @functools.cached_property
    def layout(self) -> Layout:
        """Where every row lies."""
        return self.plan.layout

    @functools.cached_property
    def layout_fingerprint(self) -> str:
        """Names the layout: states of one fingerprint fit each other's collections."""
        return checks.layout_fingerprint(self.layout)

    @functools.cached_property
    def path(self) -> Path:
        """Which implementations of the operations this mesh gets."""
        return path_of(self.mesh.devices.flat[0].platform)

    @property
    def local(self) -> LocalEmbedding:
        """The same functions on per-device blocks, for use inside a ``shard_map``."""
        return LocalEmbedding(self)

    def state_spec(self) -> EmbeddingState:
        """PartitionSpec of every leaf of the state."""
        names = tuple(
            tuple(jax.eval_shape(partial(slab.optimizer.init_slots, 1, slab.dim)))
            if slab.trainable
            else ()
            for slab in self.layout.slabs
        )
        return state_spec(self.layout, self.axes, names, self.layout_fingerprint)

    def init(self, key: jax.Array) -> EmbeddingState:
        """A fresh state; rows depend on (key, table name, id), not on the mesh.

        Args:
            key: typed JAX key, such as ``jax.random.key(0)``.
        """
        checks.check_key(key, bool(self.stored_tables))
        rates = {
            name: np.float32(1.0 if callable(rate) else rate)
            for name, table in self.tables.items()
            if table.trainable
            for rate in [rate_of(table.optimizer)]
        }
        state: EmbeddingState = programs.init_arrays(self, key, rates)
        return state

    def pack(self, features: Mapping[str, Any], rung: int | Ladder | None = None) -> PackedIds:
        """Deduplicates and addresses one batch, on the host.

        Args:
            features: by feature, ``[B]`` or ``[B, L]`` keys or a `Ragged`; exactly the
                collection's features.
            rung: exchange capacity in rows per (source, owner); None takes the smallest that
                fits, a `Ladder` the one it stays on; the collection's fixed capacity goes before
                both. More than the ids of a device is never needed and cut to that.

        In several processes ``features`` are this process's samples (there may be none), and pack
        is a collective: sizes have to be agreed on (`jaxsparse.agreement`). Samples of the global
        batch are process-major, every process's padded to as many per device as the fullest has.

        Returns:
            Ids cut over the mesh; B is padded to a multiple of its size with empty bags.

        Raises:
            ValueError: names do not match, lengths differ, a key or weight is invalid, a bag is
                too long, or a given rung is below the need.
            TypeError: keys of a wrong type.
        """
        prepare = partial(self.prepare, features)
        prepared, needs = agree(self.mesh, len(self.layout.slabs), prepare)
        return self.ship(prepared, needs, rung)

    def prepare(self, features: Mapping[str, Any]) -> PreparedIds:
        """The larger part of `pack`: host-only and without collectives, so any thread may do it.

        Raises:
            ValueError, TypeError: as `pack`, the rung aside.
        """
        if self.stored_tables:
            raise ValueError(
                f"pack: the rows of {sorted(self.stored_tables)} (Dynamic keys or tiers) come and "
                "go with the batches; make a js.RowStore(emb, emb_state) and train on its passes()"
            )
        return self.prepare_addressed(features, {})

    def prepare_addressed(
        self, features: Mapping[str, Any], addressed: Mapping[str, FixedIds | RaggedIds]
    ) -> PreparedIds:
        """`prepare` with the ids of stored tables' features as a row store has addressed them.

        Args:
            features: keys by feature; those of ``addressed`` are not looked at.
            addressed: codes by feature of a stored table: shard * rows per shard + local row.
        """
        devices = local_devices(self.mesh)
        num_devices = devices.stop - devices.start
        return prepare_ids(self.resident_features, self._encoders, num_devices, features, addressed)

    def ship(
        self,
        prepared: PreparedIds,
        needs: tuple[SlabNeed, ...],
        rung: int | Ladder | None = None,
    ) -> PackedIds:
        """The rest of `pack`: chooses sizes and makes global arrays; no collective.

        Args:
            prepared: from `prepare`; in several processes as `jaxsparse.agreement.settle` left it.
            needs: what the sizes must hold; the same in every process.
            rung: as for `pack`.
        """
        packed = prepared.pack(self._shapes(rung)(needs), needs, self.path)
        if is_shared(self.mesh):
            packed = packed.with_local_value_slots()
        shipped: PackedIds = put_blocks(packed, self.mesh, self.ids_spec(packed))
        return dataclasses.replace(shipped, host=packed.host)

    def ids_spec(self, ids: PackedIds) -> PackedIds:
        """PartitionSpec of every array of ``ids``."""
        return ids.spec(self.axes)

    def lookup(self, state: EmbeddingState, ids: PackedIds) -> tuple[Activations, Residuals]:
        """Looks up and pools a batch.

        Returns:
            Activations float32 by feature, ``[B', D]`` or ``[B', max_length, D]``, cut over the
            mesh by sample; and residuals for `update`.
        """
        self.check_ids(ids)
        checks.check_state(state, self.layout_fingerprint)
        acts, asked, vectors = programs.lookup(self, state, ids)
        # jit sorts dicts by name; the declared order is the one `local.lookup` gives.
        in_order = {spec.name: acts[spec.name] for spec in self.features}
        return in_order, Residuals(ids, asked, vectors)

    def update(
        self,
        state: EmbeddingState,
        residuals: Residuals,
        grads: Activations,
        *,
        step: jax.Array | int = 0,
        enabled: jax.Array | bool = True,
    ) -> EmbeddingState:
        """Moves every touched row once, from the summed gradient of all its occurrences.

        Args:
            state: donated by an eager call.
            residuals: from the `lookup` of the same batch.
            grads: gradients of the activations, same tree and shapes.
            step: global step; 0 is the first update.
            enabled: False changes no bit.
        """
        self.check_grads(residuals.ids, grads)
        checks.check_state(state, self.layout_fingerprint)
        new: EmbeddingState = programs.update(
            self, state, residuals, grads, checks.checked_step(step), jnp.asarray(enabled, bool)
        )
        return new

    def row_grads(self, residuals: Residuals, grads: Activations) -> RowGrads:
        """The sparse gradient: distinct rows and their summed gradients."""
        self.check_grads(residuals.ids, grads)
        local: RowGrads = programs.row_grads(self, residuals, grads)
        return dataclasses.replace(local, mesh=self.mesh)

    def apply(
        self,
        state: EmbeddingState,
        row_grads: RowGrads,
        *,
        step: jax.Array | int = 0,
        enabled: jax.Array | bool = True,
    ) -> EmbeddingState:
        """Makes the update of a sparse gradient, such as a merged or clipped one."""
        checks.check_state(state, self.layout_fingerprint)
        trainable = [slab for slab in self.layout.slabs if slab.trainable]
        checks.check_row_grads(row_grads, tuple(slab.rows_per_shard for slab in trainable))
        new: EmbeddingState = programs.apply(
            self, state, row_grads, checks.checked_step(step), jnp.asarray(enabled, bool)
        )
        return new

    def weight_grads(self, residuals: Residuals, grads: Activations) -> dict[str, jax.Array]:
        """Gradients of per-id weights, in the order of the user's values.

        Returns:
            ``[n]`` float32 by weighted feature; 0 for values that were padding or cut. After the
            ids have passed through jit, n is padded with zeros to its bucket. In several
            processes: this process's values, and never inside jit.

        Raises:
            ValueError: inside jit in several processes; ``local.weight_grads`` works there.
        """
        self.check_grads(residuals.ids, grads)
        if is_shared(self.mesh):
            return self._local_weight_grads(residuals, grads)
        by_value: dict[str, jax.Array] = programs.weight_grads(self, residuals, grads)
        host = residuals.ids.host
        if host is None:
            return by_value
        return {name: grad[: host.num_values[name]] for name, grad in by_value.items()}

    def read(self, state: EmbeddingState, table: str, keys: npt.ArrayLike) -> npt.NDArray[Any]:
        """Rows ``[n, D]`` of a table by key, in its dtype.

        In several processes `read`, `read_slots` and `write` are collectives: all of them must
        call, with the same arguments.
        """
        return table_rows.read(self, state, table, keys)

    def read_slots(
        self, state: EmbeddingState, table: str, keys: npt.ArrayLike
    ) -> dict[str, npt.NDArray[Any]]:
        """Slot variables ``[n, D]`` or ``[n]`` of a table by key; empty for a frozen table."""
        return table_rows.read_slots(self, state, table, keys)

    def write(
        self,
        state: EmbeddingState,
        table: str,
        keys: npt.ArrayLike,
        rows: npt.ArrayLike,
        *,
        as_rows: bool = False,
    ) -> EmbeddingState:
        """Overwrites rows of a table by key; slots stay. An eager call donates the state.

        Args:
            state: of the collection.
            table: its name.
            keys: ``[n]``.
            rows: ``[n, D]``.
            as_rows: ``keys`` are row numbers of the table, which its keys do not address.

        Raises:
            ValueError: shapes do not match, a value is no finite float32, or two keys address
                one row.
            TypeError: ``rows`` are no numbers.
        """
        return table_rows.write(self, state, table, keys, rows, as_rows)

    def summary(self) -> str:
        """Tables, slabs, placements, bytes per device and load balance, for people."""
        features = counted(len(self.features), "feature")
        lines = [f"{features} on {counted(self.num_shards, 'device')}, mesh axes {self.axes}"]
        for slab in self.layout.slabs:
            names = ", ".join(block.spec.name for block in slab.tables)
            rows = f"{slab.rows_per_shard:,} rows per device"
            lines.append(f"slab {slab.name}: {rows} x {slab.dim} ({names})")
        return "\n".join([*lines, self.plan.describe()])

    def rates(self, state: EmbeddingState, step: jax.Array) -> dict[str, jax.Array]:
        """Learning rate of every trainable table at a step."""
        rates = {}
        for name, leaf in state.learning_rates.items():
            rate = rate_of(self.tables[name].optimizer)
            rates[name] = jnp.float32(rate(step)) * leaf if callable(rate) else leaf
        return rates

    def check_ids(self, ids: PackedIds) -> None:
        """Raises where ids were packed by another collection."""
        rows = tuple(slab.rows_per_shard for slab in self.layout.slabs)
        expected = (tuple(self.feature_specs), rows)
        if not isinstance(ids, PackedIds):
            raise TypeError(f"ids must be PackedIds, from pack, got {type(ids).__name__}")
        if (ids.feature_names, ids.rows_per_shard) != expected:
            raise ValueError(
                "ids must come from this collection's pack: (features, rows per shard of each "
                f"slab) are {expected}, got {(ids.feature_names, ids.rows_per_shard)}"
            )
        if ids.key_rules != self._key_rules:
            rules = zip(self.features, ids.key_rules, self._key_rules, strict=True)
            checks.refuse_key_rules(rules)

    def check_grads(self, ids: PackedIds, grads: Mapping[str, Any]) -> None:
        """Raises where gradients do not match the activations of ``ids``."""
        samples = ids.padded_samples
        expected = {}
        for spec in self.features:
            bag = () if spec.combiner is not None else (bag_width(spec),)
            expected[spec.name] = (samples, *bag, spec.table.embedding_dim)
        got = {name: tuple(grad.shape) for name, grad in grads.items()}
        if got != expected:
            wrong = {
                name: (expected.get(name), got.get(name))
                for name in expected | got
                if expected.get(name) != got.get(name)
            }
            raise ValueError(
                f"grads must have the activations' tree and shapes; (expected, got): {wrong}"
            )

    def _shapes(self, rung: int | Ladder | None):  # type: ignore[no-untyped-def]
        ladder, given = (rung, None) if isinstance(rung, Ladder) else (None, rung)
        capacity = self.exchange.capacity if given is None else given
        if capacity is not None and not is_positive_int(capacity):
            raise ValueError(f"rung must be a positive int, a Ladder or None, got {capacity!r}")

        def choose(needs: tuple[SlabNeed, ...]) -> tuple[SlabShape, ...]:
            shapes = ladder.shapes(needs) if ladder else tuple(map(smallest_shape, needs))
            if capacity is None:
                return shapes
            for slab, need in zip(self.layout.slabs, needs, strict=True):
                if need.rows > capacity:
                    raise ValueError(
                        f"rung {capacity} is below the need {need.rows} (rows per source and "
                        f"owner) of slab {slab.name!r}; pass a larger one, or None to choose it"
                    )
            tops = [
                max(1, need.fixed_ids + shape.ragged_ids)
                for need, shape in zip(needs, shapes, strict=True)
            ]
            return tuple(
                SlabShape(shape.ragged_ids, min(capacity, top))
                for shape, top in zip(shapes, tops, strict=True)
            )

        return choose

    def _local_weight_grads(self, residuals: Residuals, grads: Activations) -> dict[str, jax.Array]:
        host = residuals.ids.host
        if host is None:
            raise ValueError(
                "weight_grads: in several processes it gives each its own values and cannot run "
                "inside jit; call it on the residuals of an eager lookup, or local.weight_grads "
                "inside a shard_map, whose result is in buffer order"
            )
        by_slab = programs.weight_buffers(self, residuals, grads)
        result = {}
        for buffer, slots in zip(by_slab, host.value_slots, strict=True):
            # One more, 0, for values that were dropped.
            values = np.append(local_block(buffer), np.float32(0)) if slots else np.empty(0)
            for name, slot in slots.items():
                result[name] = jnp.asarray(values[slot[: host.num_values[name]]])
        return result
