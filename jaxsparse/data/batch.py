# SPDX-License-Identifier: Apache-2.0
"""What a training step eats: features, dense values, labels and weights of B samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.key_arrays import key_array, unmasked
from jaxsparse.ragged import Ragged

Array = npt.NDArray[Any]
Float32s = npt.NDArray[np.float32]
Labels = Float32s | dict[str, Float32s]


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """``B`` samples as numpy arrays.

    >>> batch = Batch({"item": np.array([7, 8, 9])}, labels=np.array([0, 1, 1]))
    >>> batch.take([2, 0]).features["item"]
    array([9, 7])
    """

    features: dict[str, Array | Ragged]
    """Keys by feature: [B], [B, L] with padding, or `Ragged` of B bags."""

    dense: Float32s | None = None
    """Values [B, d] float32, or None."""

    labels: Any = None
    """[B] float32, or one such array per task: {name: [B]}."""

    weights: Float32s | None = None
    """[B] float32, how much each sample counts; None is 1."""

    def __post_init__(self) -> None:
        """Turns columns into arrays and checks that all have B samples.

        Raises:
            ValueError: a column holds no real numbers, a masked entry, or more or fewer than B
                samples, or the weights' sum is beyond float32; the message names the column.
        """
        features = {
            name: column if isinstance(column, Ragged) else _keys(name, column)
            for name, column in self.features.items()
        }
        object.__setattr__(self, "features", features)
        if self.labels is None:
            raise ValueError("Batch: labels are missing; give zeros where none are known")
        if isinstance(self.labels, Mapping):
            if not self.labels:
                raise ValueError("Batch: labels must name at least one task, got {}")
            tasks = {
                name: _float32s(f"labels[{name!r}]", values) for name, values in self.labels.items()
            }
            object.__setattr__(self, "labels", tasks)
        else:
            object.__setattr__(self, "labels", _float32s("labels", self.labels))
        for name in ("dense", "weights"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _float32s(name, getattr(self, name)))
        if self.dense is not None and self.dense.ndim != 2:
            raise ValueError(f"Batch: dense must have shape [B, d], got {self.dense.shape}")
        self._check_lengths()
        self._check_total_weight()

    @property
    def num_samples(self) -> int:
        """B."""
        return len(next(self._label_columns())[1])

    def slice(self, start: int, stop: int) -> Batch:
        """Samples ``start`` to ``stop - 1``, as views."""
        features: dict[str, Array | Ragged] = {
            name: column.slice(start, stop) if isinstance(column, Ragged) else column[start:stop]
            for name, column in self.features.items()
        }
        return self._select(features, slice(start, stop))

    def take(self, indices: npt.ArrayLike) -> Batch:
        """The samples of ``indices`` ``[M]``, in that order."""
        rows = np.asarray(indices, np.int64)
        features: dict[str, Array | Ragged] = {
            name: column.take(rows) if isinstance(column, Ragged) else column[rows]
            for name, column in self.features.items()
        }
        return self._select(features, rows)

    def _select(self, features: dict[str, Array | Ragged], rows: Any) -> Batch:
        labels: Labels
        if isinstance(self.labels, dict):
            labels = {name: values[rows] for name, values in self.labels.items()}
        else:
            labels = self.labels[rows]
        dense = None if self.dense is None else self.dense[rows]
        weights = None if self.weights is None else self.weights[rows]
        return Batch(features, dense, labels, weights)

    def _label_columns(self) -> Iterator[tuple[str, Float32s]]:
        if isinstance(self.labels, dict):
            yield from ((f"labels[{name!r}]", values) for name, values in self.labels.items())
        else:
            yield "labels", self.labels

    def _check_lengths(self) -> None:
        for name, values in self._label_columns():
            if values.ndim != 1:
                raise ValueError(f"Batch: {name} must have shape [B], got {values.shape}")
        columns: dict[str, Any] = dict(self._label_columns())
        columns |= {f"features[{name!r}]": column for name, column in self.features.items()}
        columns |= {"dense": self.dense, "weights": self.weights}
        for name, column in columns.items():
            if column is not None and len(column) != self.num_samples:
                raise ValueError(
                    f"Batch: {name} has {len(column)} samples, but labels have {self.num_samples}"
                )

    def _check_total_weight(self) -> None:
        if self.weights is None:
            return
        total = self.weights.sum(dtype=np.float64)
        # Weights that are infinite themselves are another fault, and shown by the loss.
        if np.isfinite(total) and abs(total) > np.finfo(np.float32).max:
            raise ValueError(
                f"Batch: weights add up to {total:g}, which is beyond float32; scale them down"
            )


def _keys(name: str, column: Any) -> Array:
    return key_array(unmasked(f"Batch: features[{name!r}]", column))


def _float32s(name: str, values: npt.ArrayLike) -> Float32s:
    array = np.asarray(unmasked(f"Batch: {name}", values))
    dtype = array.dtype
    # numpy calls bfloat16 and its kin, which only jax knows, void without fields.
    is_real = dtype.kind in "biuf" or (dtype.kind == "V" and dtype.names is None)
    if not is_real:
        raise ValueError(f"Batch: {name} must hold real numbers or bools, got dtype {dtype}")
    with np.errstate(over="ignore"):
        floats = array.astype(np.float32, copy=False)
    if dtype.kind == "f" and dtype.itemsize > floats.itemsize:
        beyond = np.isinf(floats) & np.isfinite(array)
        if beyond.any():
            value = array[beyond][0]
            raise ValueError(f"Batch: {name} must fit float32, got {value:g}")
    return floats
