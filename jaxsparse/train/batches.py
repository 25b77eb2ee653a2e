# SPDX-License-Identifier: Apache-2.0
"""A batch on its way to the devices: checked, padded to the mesh, ids packed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, Protocol

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
from jaxsparse.processes import local_block, put_blocks

OnBadSample = Literal["error", "skip", "drop"]


class Dataset(Protocol):
    """Anything that yields batches each time it is iterated."""

    def __iter__(self) -> Iterator[Batch]:
        """One pass over the data."""
        ...


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


def bad_samples(batch: Batch, probabilities: bool) -> tuple[npt.NDArray[np.bool_], str]:
    """Which samples hold a value that is not finite, a negative weight or a label out of range.

    Args:
        batch: the samples.
        probabilities: whether labels have to lie in [0, 1].

    Returns:
        ``[B]`` bool, and the text for an error message ("" where all are finite).
    """
    columns: dict[str, Any] = {"weights": batch.weights, "dense": batch.dense}
    if isinstance(batch.labels, dict):
        columns |= {f"labels[{name!r}]": values for name, values in batch.labels.items()}
    else:
        columns["labels"] = batch.labels
    bad = np.zeros(batch.num_samples, bool)
    first = ""
    for name, values in columns.items():
        if values is None:
            continue
        good = np.isfinite(np.asarray(values, np.float32))
        if name == "weights":
            good &= np.asarray(values) >= 0
        elif probabilities and name.startswith("labels"):
            inside = (np.asarray(values) >= 0) & (np.asarray(values) <= 1)
            # Samples of weight 0 may hold any label.
            good &= inside if batch.weights is None else inside | (batch.weights == 0)
        if good.all():
            continue
        where = tuple(int(i) for i in np.argwhere(~good)[0])
        column = f", column {where[1]}" if len(where) > 1 else ""
        first = first or f"{name} is {np.asarray(values)[where]} in sample {where[0]}{column}"
        bad |= ~good.reshape(batch.num_samples, -1).all(axis=1)
    return bad, first


def admit(batch: Batch, on_bad_sample: OnBadSample, probabilities: bool) -> Batch | None:
    """The batch to train on under a policy; None when it is to be skipped.

    Raises:
        ValueError: the batch is empty, or a sample is bad and the policy is ``"error"``.
    """
    if batch.num_samples == 0:
        raise ValueError("the batch has no samples; leave empty batches out of the dataset")
    bad, first = bad_samples(batch, probabilities)
    if not first:
        return batch
    if on_bad_sample == "error":
        raise ValueError(
            f"{first} ({int(bad.sum())} of {batch.num_samples} samples are bad); mend the data, "
            "or set on_bad_sample='drop' (leave such samples out) or 'skip' (leave the batch out)"
        )
    if on_bad_sample == "skip" or bad.all():
        return None
    return batch.take(np.flatnonzero(~bad))


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


def _pad(values: npt.NDArray[Any], size: int) -> npt.NDArray[np.float32]:
    padded = np.zeros((size, *np.shape(values)[1:]), np.float32)
    padded[: len(values)] = values
    return padded


def unpad(tree: Any, num_samples: int) -> Any:
    """This process's part of arrays, on the host, cut to its real samples."""
    return jax.tree.map(lambda x: local_block(x)[:num_samples], tree)
