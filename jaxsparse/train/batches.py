# SPDX-License-Identifier: Apache-2.0
"""Batches before and behind the devices: which samples are admitted, and padding taken off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol

import jax
import numpy as np
import numpy.typing as npt

from jaxsparse.data.batch import Batch
from jaxsparse.processes import local_block

OnBadSample = Literal["error", "skip", "drop"]


class Dataset(Protocol):
    """Anything that yields batches each time it is iterated."""

    def __iter__(self) -> Iterator[Batch]:
        """One pass over the data."""
        ...


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


def unpad(tree: Any, num_samples: int) -> Any:
    """This process's part of arrays, on the host, cut to its real samples."""
    return jax.tree.map(lambda x: local_block(x)[:num_samples], tree)
