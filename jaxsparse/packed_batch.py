# SPDX-License-Identifier: Apache-2.0
"""`PackedBatch`: samples on the mesh, and how they get there."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import PartitionSpec

from jaxsparse.agreement import agree
from jaxsparse.data.batch import Batch
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.ladder import Ladder, SlabNeed
from jaxsparse.packed import PackedIds
from jaxsparse.prepared import PreparedIds
from jaxsparse.processes import put_blocks


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("ids", "dense", "labels", "weights"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """A batch on the mesh, cut by sample; padded samples have weight 0 and empty bags."""

    ids: PackedIds
    dense: jax.Array | None
    """``[B', d]`` float32."""
    labels: Any
    """``[B']`` float32, or a dict of them."""
    weights: jax.Array
    """``[B']`` float32."""

    @property
    def num_samples(self) -> int:
        """B: samples that are not padding."""
        return self.ids.num_samples

    def spec(self, emb: EmbeddingCollection) -> PackedBatch:
        """PartitionSpec of every array."""
        cut: Any = PartitionSpec(emb.axes)
        spec = jax.tree.map(lambda _: cut, self)
        return dataclasses.replace(spec, ids=emb.ids_spec(self.ids))  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class PreparedBatch:
    """A batch whose ids are addressed and deduplicated, not yet shipped; any thread may make it."""

    batch: Batch
    ids: PreparedIds


def prepare_batch(emb: EmbeddingCollection, batch: Batch | PreparedBatch) -> PreparedBatch:
    """The host's share of packing; a prepared batch is returned as it is."""
    if isinstance(batch, PreparedBatch):
        return batch
    ids = emb.prepare(batch.features)
    if ids.num_samples != batch.num_samples:
        raise ValueError(
            f"features have {ids.num_samples} samples, labels {batch.num_samples}: they must agree"
        )
    return PreparedBatch(batch, ids)


def ship_batch(
    emb: EmbeddingCollection,
    prepared: PreparedBatch,
    needs: tuple[SlabNeed, ...],
    ladder: Ladder | None,
) -> PackedBatch:
    """Ships ids and all columns, padded to the samples of this process's devices."""
    batch, size = prepared.batch, prepared.ids.samples * prepared.ids.num_devices
    ids = emb.ship(prepared.ids, needs, ladder)
    weights = np.ones(batch.num_samples, np.float32) if batch.weights is None else batch.weights
    columns = jax.tree.map(partial(_pad, size=size), (batch.dense, batch.labels, weights))
    specs = jax.tree.map(lambda _: PartitionSpec(emb.axes), columns)
    dense, labels, weights = put_blocks(columns, emb.mesh, specs)
    return PackedBatch(ids, dense, labels, weights)


def pack_batch(
    emb: EmbeddingCollection, batch: Batch | PreparedBatch, ladder: Ladder | None
) -> PackedBatch:
    """Packs ids and ships all columns, padded to a multiple of the mesh.

    In several processes a collective, and columns must have one form everywhere: a `Lockstep`
    checks that.
    """
    raw = batch.batch if isinstance(batch, PreparedBatch) else batch
    ids, needs = agree(emb.mesh, len(emb.layout.slabs), lambda: prepare_batch(emb, batch).ids)
    return ship_batch(emb, PreparedBatch(raw, ids), needs, ladder)


def _pad(values: npt.NDArray[Any], size: int) -> npt.NDArray[np.float32]:
    padded = np.zeros((size, *np.shape(values)[1:]), np.float32)
    padded[: len(values)] = values
    return padded
