# SPDX-License-Identifier: Apache-2.0
"""Datasets of columns in memory: what is read, what is refused, and where they go on."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from jaxsparse.data.arrays import ArrayDataset, from_arrays
from jaxsparse.ragged import Ragged

BIG = 720575940631797753  # float64 would make it ...760

COLUMNS: dict[str, Any] = {
    "item": [BIG, 2, 3],
    "city": ["a", "b", "a"],
    "clicked": [[1, 2], [], [BIG]],
    "age": [0.5, 1.5, 2.5],
    "w": [1.0, 0.0, 2.0],
    "label": [0, 1, 0],
}
ROLES: dict[str, Any] = {"dense": ["age"], "weight": "w"}


def as_polars(columns: dict[str, Any]) -> pl.DataFrame:
    return pl.DataFrame(columns)


def as_polars_categorical(columns: dict[str, Any]) -> pl.DataFrame:
    return pl.DataFrame(columns).with_columns(pl.col("city").cast(pl.Categorical))


def as_filtered_pandas(columns: dict[str, Any]) -> pd.DataFrame:
    frame = pd.concat([pd.DataFrame(columns), pd.DataFrame(columns)], ignore_index=True)
    return frame[frame.index >= 3]


def as_numpy(columns: dict[str, Any]) -> dict[str, Any]:
    ragged = Ragged.from_lists(columns["clicked"])
    return {n: np.array(c) for n, c in columns.items() if n != "clicked"} | {"clicked": ragged}


def as_series(columns: dict[str, Any]) -> dict[str, Any]:
    series = {name: pd.Series(column) for name, column in columns.items()}
    return series | {"item": pl.Series(columns["item"]), "clicked": pa.array(columns["clicked"])}


def rows_seen(dataset: ArrayDataset) -> list[int]:
    return [int(key) for batch in dataset for key in batch.features["item"]]


def numbered(num_rows: int, batch_size: int, **options: Any) -> ArrayDataset:
    columns = {"item": np.arange(num_rows), "label": np.arange(num_rows) % 2}
    return from_arrays(columns, batch_size, **options)


@pytest.mark.parametrize(
    "convert",
    [
        dict,
        as_numpy,
        as_series,
        pd.DataFrame,
        as_filtered_pandas,
        as_polars,
        as_polars_categorical,
        pa.table,
    ],
)
def test_every_kind_of_table_gives_the_same_batches(convert: Any) -> None:
    dataset = from_arrays(convert(COLUMNS), 2, **ROLES)
    first, second = list(dataset)
    assert sorted(first.features) == ["city", "clicked", "item"]
    assert first.features["item"].dtype == np.int64
    assert first.features["item"].tolist() == [BIG, 2]
    assert first.features["city"].tolist() == ["a", "b"]
    assert [bag.tolist() for bag in first.features["clicked"]] == [[1, 2], []]
    assert [bag.tolist() for bag in second.features["clicked"]] == [[BIG]]
    assert first.dense.tolist() == [[0.5], [1.5]]
    assert first.labels.tolist() == [0, 1]
    assert first.weights.tolist() == [1, 0]
    assert first.labels.dtype == first.dense.dtype == first.weights.dtype == np.float32
    assert (dataset.batch_size, dataset.num_rows, len(dataset)) == (2, 3, 2)


@pytest.mark.parametrize("convert", [dict, pl.DataFrame, pd.DataFrame, pa.table])
def test_extreme_keys_stay_exact(convert: Any) -> None:
    columns = {
        "signed": np.array([-(2**63), 2**63 - 1]),
        "unsigned": np.array([0, 2**64 - 1], np.uint64),
        "label": np.array([0, 1]),
    }
    features = from_arrays(convert(columns), 2).rows.features
    assert features["signed"].tolist() == [-(2**63), 2**63 - 1]
    assert features["unsigned"].tolist() == [0, 2**64 - 1]


def test_several_labels_and_two_dimensional_columns() -> None:
    columns = {"pair": np.array([[1, 2], [3, 4]]), "x": np.ones((2, 3)), "a": [0, 1], "b": [2, 3]}
    batch = next(iter(from_arrays(columns, 2, label=["a", "b"], dense=["x"])))
    assert list(batch.labels) == ["a", "b"]
    assert batch.dense.shape == (2, 3)
    assert batch.features["pair"].shape == (2, 2)


def test_bool_and_regression_labels() -> None:
    assert from_arrays({"a": [1, 2], "label": [True, False]}, 2).rows.labels.tolist() == [1, 0]
    assert from_arrays({"a": [1, 2], "label": [-0.5, 7]}, 2).rows.labels.tolist() == [-0.5, 7]


def test_drop_last() -> None:
    dataset = numbered(7, 3, drop_last=True)
    assert len(dataset) == 2
    assert rows_seen(dataset) == [0, 1, 2, 3, 4, 5]


def test_every_epoch_has_each_row_once_in_an_order_of_its_own() -> None:
    dataset = numbered(50, 8, shuffle=True, seed=4)
    epochs = [rows_seen(dataset) for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = numbered(50, 16, shuffle=True, seed=4)
    assert [rows_seen(again) for _ in range(3)] == epochs  # whatever the batch size
    assert rows_seen(numbered(50, 8, shuffle=True, seed=5)) != epochs[0]


@pytest.mark.parametrize("stop", [0, 1, 5, 6, 7, 8, 13, 14, 20])
def test_a_restored_dataset_goes_on_where_the_other_stopped(stop: int) -> None:
    """7 batches an epoch, 3 epochs; `stop` batches are consumed before the state is taken."""

    def stream(dataset: ArrayDataset) -> Any:
        while True:
            yield from dataset

    whole = stream(numbered(50, 8, shuffle=True, seed=2))
    want = [next(whole).features["item"].tolist() for _ in range(21)]
    first = numbered(50, 8, shuffle=True, seed=2)
    batches = stream(first)
    got = [next(batches).features["item"].tolist() for _ in range(stop)]
    state = json.loads(json.dumps(first.state()))
    second = numbered(50, 8, shuffle=True, seed=2)
    second.restore(state)
    assert second.state() == state
    rest = stream(second)
    got += [next(rest).features["item"].tolist() for _ in range(21 - stop)]
    assert got == want


def test_an_abandoned_epoch_is_over() -> None:
    dataset = numbered(50, 8, shuffle=True)
    next(iter(dataset))
    second = rows_seen(dataset)
    other = numbered(50, 8, shuffle=True)
    rows_seen(other)
    assert second == rows_seen(other)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 3}, "saved with seed=2, but this dataset has seed=3"),
        ({"num_rows": 51}, "saved with num_rows=50, but this dataset has num_rows=51"),
        ({"batch_size": 9}, "saved with batch_size=8, but this dataset has batch_size=9"),
        ({"shuffle": True}, "saved with shuffle=False, but this dataset has shuffle=True"),
    ],
)
def test_a_state_of_other_batches_is_refused(change: dict[str, Any], text: str) -> None:
    base = {"num_rows": 50, "batch_size": 8, "seed": 2}
    state = numbered(**base).state()
    with pytest.raises(ValueError, match=text):
        numbered(**(base | change)).restore(state)


def test_a_broken_state_is_refused() -> None:
    dataset = numbered(50, 8)
    with pytest.raises(ValueError, match=r"state of the dataset lacks \['epoch'\]"):
        dataset.restore({k: v for k, v in dataset.state().items() if k != "epoch"})
    with pytest.raises(ValueError, match=r"offset in 0..6, got 0 and 7"):
        dataset.restore(dataset.state() | {"offset": 7})


def changed(**change: Any) -> dict[str, Any]:
    return {name: column for name, column in (COLUMNS | change).items() if column is not None}


@pytest.mark.parametrize("convert", [dict, pd.DataFrame, pl.DataFrame])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"age": [0.5, float("nan"), 1.0]}, "dense column 'age' is nan at row 1; every value"),
        ({"age": [0.5, 1.0, float("-inf")]}, "dense column 'age' is -inf at row 2; every value"),
        ({"label": [0.0, float("nan"), 1.0]}, "label column 'label' is nan at row 1"),
        ({"w": [1.0, -2.0, 1.0]}, "weight column 'w' is -2.0 at row 1; weights must not be neg"),
        (
            {"item": [0.5, 1.0, 2.0]},
            r"feature column 'item' must hold integers or strings, got float64 \(0.5 at row 0\); "
            "name it in dense=, or cast ids to int64",
        ),
        (
            {"item": [True, False, True]},
            r"feature column 'item' must hold integers or strings, got bool \(True at row 0\); "
            "cast it to int64",
        ),
        ({"city": ["a", None, "b"]}, "column 'city' is (null|None) at row 1; fill or drop"),
        ({"label": None, "labels": [0, 1, 0]}, "no label column 'label'; did you mean 'labels'?"),
        (
            {"label": None},
            "no label column 'label'; columns are 'item', 'city', 'clicked', 'age', 'w'",
        ),
        ({"age": None, "agee": [1, 2, 3]}, "no dense column 'age'; did you mean 'agee'?"),
        ({"w": None}, "no weight column 'w'; columns are"),
        ({"age": ["x", "y", "z"]}, "dense column 'age' must hold numbers, got"),
        ({"age": [[1], [2], [3]]}, "dense column 'age' must hold numbers, got lists"),
        ({"clicked": [[0.5], [], [1.5]]}, r"column 'clicked' .* got float(?:64)? \(0.5 at row 0\)"),
    ],
)
def test_bad_columns_are_refused_before_training(
    convert: Any, change: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        from_arrays(convert(changed(**change)), 2, **ROLES)


def test_values_that_overflow_float32_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dense column 'age' is 1e\+39 at row 2"):
        from_arrays(changed(age=[0, 1, 1e39]), 2, **ROLES)


def test_nullable_integers_never_pass_through_floats() -> None:
    frame = pd.DataFrame(changed(item=pd.array([BIG, None, 3], "Int64")))
    for data in (frame, changed(item=frame["item"]), pl.DataFrame(changed(item=[BIG, None, 3]))):
        with pytest.raises(ValueError, match="column 'item' is null at row 1; fill or drop"):
            from_arrays(data, 2, **ROLES)


def test_unequal_lengths_and_no_rows() -> None:
    with pytest.raises(ValueError, match="'clicked' has 1 rows, 'item' has 3"):
        from_arrays(changed(clicked=[[1]]), 2, **ROLES)
    with pytest.raises(ValueError, match="data has no rows"):
        from_arrays({"a": [], "label": []}, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be an int >= 1, got 0"),
        ({"seed": -1}, ValueError, "seed must be >= 0, got -1"),
        ({"dense": "age"}, TypeError, "dense must be a list of column names, got the str 'age'"),
        ({"weight": "age"}, ValueError, "column 'age' is named twice: as dense and as weight"),
        ({"batch_size": 4, "drop_last": True}, ValueError, "drop_last leaves nothing of 3 rows"),
        ({"data": [1, 2]}, TypeError, "data must be a dict of columns or a pandas, polars or"),
        ({"data": changed(item=3)}, TypeError, "column 'item' must be an array or a list, got int"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    defaults: dict[str, Any] = {"data": COLUMNS, "batch_size": 2, **ROLES}
    with pytest.raises(error, match=text):
        from_arrays(**(defaults | arguments))
