# SPDX-License-Identifier: Apache-2.0
"""Batches out of columns in memory, in an order that can be taken up again anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxsparse.data.batch import Array, Batch
from jaxsparse.data.columns import check_keys, number_column, require, to_columns
from jaxsparse.data.epochs import EpochDataset, State


class ArrayDataset(EpochDataset):
    """Batches of the rows of one big `Batch`; made by `from_arrays`.

    With ``shuffle`` the order of an epoch depends on (seed, epoch) alone.

    >>> rows = from_arrays({"item": [1, 2, 3, 4, 5], "label": [0, 1, 0, 1, 1]}, batch_size=2)
    >>> [batch.features["item"].tolist() for batch in rows]
    [[1, 2], [3, 4], [5]]
    """

    def __init__(
        self,
        rows: Batch,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """Starts before the first batch of epoch 0."""
        _check_positive("batch_size", batch_size)
        if seed < 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        if not rows.num_samples:
            raise ValueError("data has no rows")
        if drop_last and rows.num_samples < batch_size:
            raise ValueError(
                f"drop_last leaves nothing of {rows.num_samples} rows in batches of {batch_size}"
            )
        super().__init__(batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self._rows = rows

    @property
    def num_rows(self) -> int:
        """Rows in all."""
        return self._rows.num_samples

    @property
    def rows(self) -> Batch:
        """All rows as one batch, in their original order."""
        return self._rows

    def _identity(self) -> State:
        return {
            "num_rows": self.num_rows,
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drop_last": self._drop_last,
        }

    def _batches(self, epoch: int, offset: int) -> Iterator[Batch]:
        order = self._order(epoch)
        for number in range(offset, len(self)):
            start = number * self._batch_size
            stop = min(start + self._batch_size, self.num_rows)
            if order is None:
                batch = self._rows.slice(start, stop)
            else:
                batch = self._rows.take(order[start:stop])
            self._passed(epoch, number)
            yield batch

    def _order(self, epoch: int) -> Array | None:
        if not self._shuffle:
            return None
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))
        return np.random.Generator(bits).permutation(self.num_rows)


def from_arrays(
    data: Any,
    batch_size: int,
    *,
    label: str | Sequence[str] = "label",
    dense: Sequence[str] = (),
    weight: str | None = None,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
) -> ArrayDataset:
    """A dataset of columns in memory. Columns that have no other role are features.

    Args:
        data: a dict of numpy arrays, `Ragged` or lists, or a pandas, polars or pyarrow table.
            Columns of lists become `Ragged`; 64-bit integers stay exact.
        batch_size: rows in a batch.
        label: the column of labels, or one column per task.
        dense: columns of dense values, stacked in this order to ``[B, d]`` float32.
        weight: the column of sample weights, >= 0.
        shuffle: every epoch in an order of its own, drawn from (seed, epoch).
        seed: >= 0.
        drop_last: leave out a last batch that is not full.

    Raises:
        ValueError: before anything is trained: a column is missing, columns differ in length, a
            value is NaN, infinite or null, or a feature holds floats. The message names column,
            row and value.

    >>> rows = from_arrays({"item": [7, 8], "age": [0.5, 2.0], "label": [0, 1]}, 2, dense=["age"])
    >>> next(iter(rows)).dense.tolist()
    [[0.5], [2.0]]
    """
    if isinstance(dense, str):
        raise TypeError(f"dense must be a list of column names, got the str {dense!r}")
    labels = [label] if isinstance(label, str) else list(label)
    columns = to_columns(data)
    roles = [(name, "label") for name in labels] + [(name, "dense") for name in dense]
    if weight is not None:
        roles.append((weight, "weight"))
    for name, role in roles:
        require(columns, name, role)
    _check_roles(roles)
    numbers = {name: number_column(role, name, columns[name]) for name, role in roles}
    if weight is not None and (numbers[weight] < 0).any():
        row = int((numbers[weight] < 0).argmax())
        raise ValueError(
            f"weight column {weight!r} is {columns[weight][row]} at row {row}; "  # type: ignore[index]
            "weights must not be negative"
        )
    features = {name: check_keys(name, c) for name, c in columns.items() if name not in numbers}
    rows = Batch(
        features=features,
        dense=np.column_stack([numbers[name] for name in dense]) if dense else None,
        labels=numbers[label] if isinstance(label, str) else {n: numbers[n] for n in labels},
        weights=None if weight is None else numbers[weight],
    )
    return ArrayDataset(rows, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an int >= 1, got {value!r}")


def _check_roles(roles: Sequence[tuple[str, str]]) -> None:
    seen: dict[str, str] = {}
    for name, role in roles:
        if name in seen:
            raise ValueError(f"column {name!r} is named twice: as {seen[name]} and as {role}")
        seen[name] = role
