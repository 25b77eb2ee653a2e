# SPDX-License-Identifier: Apache-2.0
"""CSV and Parquet files: exact values, and errors that name file, line, column and value."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxsparse.data.cells import read_header
from jaxsparse.data.files import from_files, read_files
from jaxsparse.data.open_files import stream_files
from jaxsparse.data.schema import ColumnSchema, DataError, FeatureColumn
from jaxsparse.ragged import Ragged

BIG = 720575940631797753  # float64 would make it ...760

SCHEMA = ColumnSchema(
    label="click",
    dense=("age",),
    weight="w",
    features={
        "item": "item_id",
        "city": FeatureColumn(type="string"),
        "clicked": FeatureColumn(column="history", separator="|"),
    },
)
HEADER = "click,item_id,city,history,age,w,unused"
LINES = [HEADER, f"1,{BIG},Köln,1|2,0.5,1,x", '0,-5,"a, b",,1e3,0.5,', f"1,0,NA,{BIG},-2,2,z"]


def write_csv(path: Path, lines: list[str], end: str = "\n", bom: bool = False) -> Path:
    text = end.join(lines) + end
    data = (b"\xef\xbb\xbf" if bom else b"") + text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def changed(line: int, text: str) -> list[str]:
    """The lines with one of them (numbered from 1, the header) replaced."""
    return [*LINES[: line - 1], text, *LINES[line:]]


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def parquet_columns(**change: Any) -> dict[str, Any]:
    columns = {
        "click": [1, 0, 1],
        "item_id": [BIG, -5, 0],
        "city": ["Köln", "a, b", "NA"],
        "history": [[1, 2], [], [BIG]],
        "age": [0.5, 1e3, -2.0],
        "w": [1.0, 0.5, 2.0],
    }
    return columns | change


def assert_right(columns: dict[str, Any]) -> None:
    assert list(columns) == ["item", "city", "clicked", "click", "w", "age"]
    assert columns["item"].dtype == np.int64
    assert columns["item"].tolist() == [BIG, -5, 0]
    assert columns["city"].tolist() == ["Köln", "a, b", "NA"]
    assert [bag.tolist() for bag in columns["clicked"]] == [[1, 2], [], [BIG]]
    assert columns["click"].tolist() == [1, 0, 1]
    assert columns["age"].tolist() == [0.5, 1000, -2]
    assert columns["w"].tolist() == [1, 0.5, 2]
    assert columns["click"].dtype == columns["age"].dtype == columns["w"].dtype == np.float32


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", [False, True])
def test_csv_is_read_exactly(tmp_path: Path, name: str, end: str, bom: bool) -> None:
    assert_right(read_files(write_csv(tmp_path / name, LINES, end, bom), SCHEMA))


def test_blank_lines_and_a_missing_last_newline_change_nothing(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [*LINES[:2], "", *LINES[2:], "", ""])
    assert_right(read_files(path, SCHEMA))
    path.write_text("\n".join(LINES), encoding="utf-8")
    assert_right(read_files(str(path), SCHEMA))


def test_tabs(tmp_path: Path) -> None:
    lines = ["label\ta\tb", "1\t7\tx y", "0\t8\t"]
    schema = ColumnSchema(features={"a": "a", "b": FeatureColumn(type="string")}, delimiter="\t")
    columns = read_files(write_csv(tmp_path / "a.tsv.gz", lines), schema)
    assert columns["a"].tolist() == [7, 8]
    assert columns["b"].tolist() == ["x y", ""]


@pytest.mark.parametrize("row_group_size", [1, 2, 3])
def test_parquet_is_read_exactly(tmp_path: Path, row_group_size: int) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, parquet_columns(), row_group_size=row_group_size)
    assert_right(read_files(path, SCHEMA))


def test_parquet_cells_of_text_are_split_like_csv(tmp_path: Path) -> None:
    columns = parquet_columns(history=["1|2", "", str(BIG)])
    assert_right(read_files(write_parquet(tmp_path / "a.parquet", columns), SCHEMA))


def test_parquet_dictionaries_that_differ_between_row_groups(tmp_path: Path) -> None:
    cities = [f"city {i % 7}" if i < 50 else f"other {i}" for i in range(100)]
    columns = {"label": [0, 1] * 50, "city": pa.array(cities).dictionary_encode()}
    path = write_parquet(tmp_path / "a.parquet", columns, row_group_size=9)
    schema = ColumnSchema(features={"city": FeatureColumn(type="string")})
    assert read_files(path, schema)["city"].tolist() == cities


def test_parquet_lists_over_pages_and_row_groups(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    bags = [list(range(int(n))) for n in [2000, 0, 3000, *rng.integers(0, 300, 200)]]
    columns = {"label": [0.0] * len(bags), "a": bags}
    path = write_parquet(tmp_path / "a.parquet", columns, row_group_size=20, data_page_size=64)
    read = read_files(path, ColumnSchema(features={"a": "a"}))["a"]
    assert isinstance(read, Ragged)
    assert read.lengths.tolist() == [len(bag) for bag in bags]
    assert read.values.tolist() == [key for bag in bags for key in bag]


def test_parquet_delta_encoded_extremes(tmp_path: Path) -> None:
    keys = [-(2**63), 2**63 - 1, 0]
    path = tmp_path / "a.parquet"
    columns = {"label": [0, 1, 0], "a": keys, "u": np.array([2**64 - 1, 0, 1], np.uint64)}
    encoding = {"a": "DELTA_BINARY_PACKED"}
    write_parquet(path, columns, use_dictionary=False, column_encoding=encoding)
    read = read_files(path, ColumnSchema(features={"a": "a", "u": "u"}))
    assert read["a"].tolist() == keys
    assert read["u"].tolist() == [2**64 - 1, 0, 1]


def test_csv_extremes_signed_and_unsigned(tmp_path: Path) -> None:
    lines = ["label,a,u", f"0,{-(2**63)},0", f"1,{2**63 - 1},{2**64 - 1}"]
    schema = ColumnSchema(features={"a": "a", "u": "u"})
    read = read_files(write_csv(tmp_path / "a.csv", lines), schema)
    assert read["a"].tolist() == [-(2**63), 2**63 - 1]
    assert read["u"].tolist() == [0, 2**64 - 1]


def test_files_are_joined_in_order(tmp_path: Path) -> None:
    first = write_csv(tmp_path / "a.csv", LINES)
    second = write_parquet(tmp_path / "b.parquet", parquet_columns())
    header_only = write_csv(tmp_path / "c.csv", LINES[:1])
    no_rows = tmp_path / "d.parquet"
    pq.write_table(pa.table(parquet_columns()).slice(0, 0), no_rows)
    columns = read_files([first, header_only, second, no_rows], SCHEMA)
    assert columns["item"].tolist() == [BIG, -5, 0] * 2
    assert [bag.tolist() for bag in columns["clicked"]] == [[1, 2], [], [BIG]] * 2


def test_unsigned_keys_in_one_file_only(tmp_path: Path) -> None:
    schema = ColumnSchema(features={"a": "a"})
    small = write_csv(tmp_path / "a.csv", ["label,a", "0,5"])
    large = write_csv(tmp_path / "b.csv", ["label,a", f"1,{2**64 - 1}"])
    negative = write_csv(tmp_path / "c.csv", ["label,a", "1,-1"])
    assert read_files([small, large], schema)["a"].tolist() == [5, 2**64 - 1]
    with pytest.raises(DataError, match="column 'a' differs between the files: keys of int64 and"):
        read_files([large, negative], schema)


def test_a_dataset_of_files(tmp_path: Path) -> None:
    dataset = from_files(write_csv(tmp_path / "a.csv", LINES), SCHEMA, 2, shuffle=True, seed=1)
    assert (len(dataset), dataset.num_rows) == (2, 3)
    batch = next(iter(dataset))
    assert set(batch.features) == {"item", "city", "clicked"}
    assert batch.dense.shape == (2, 1)


def test_any_label(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", ["label,a", "-2.5,1", "7,2"])
    schema = ColumnSchema(label_kind="any", features={"a": "a"})
    assert read_files(path, schema)["label"].tolist() == [-2.5, 7]


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize(
    ("line", "cells", "text"),
    [
        (3, "0,5,a,,1.0,1", "line 3: expected 7 columns, got 6"),
        (4, "0,5,a,,1.0,1,x,y", "line 4: expected 7 columns, got 8"),
        (3, "2,5,a,,1.0,1,x", "line 3: label column 'click' must be 0 or 1, got '2'"),
        (2, ",5,a,,1.0,1,x", "line 2: label column 'click' must be 0 or 1, got ''"),
        (4, "yes,5,a,,1.0,1,x", "line 4: label column 'click' must be 0 or 1, got 'yes'"),
        (4, "nan,5,a,,1.0,1,x", "line 4: label column 'click' must be 0 or 1, got 'nan'"),
        (
            3,
            "0,5.5,a,,1.0,1,x",
            "line 3: feature column 'item_id' must be an integer "
            "(strings need type = \"string\"), got '5.5'",
        ),
        (
            2,
            "0,0x10,a,,1.0,1,x",
            "line 2: feature column 'item_id' must be an integer "
            "(strings need type = \"string\"), got '0x10'",
        ),
        (
            2,
            "0,,a,,1.0,1,x",
            "line 2: feature column 'item_id' must be an integer (empty cells need missing = a "
            "key, or separator where cells hold several), got ''",
        ),
        (
            3,
            "0,18446744073709551616,a,,1.0,1,x",
            "line 3: feature column 'item_id' must be an integer of 64 bits, "
            "got '18446744073709551616'",
        ),
        (
            3,
            "0,5,a,1|x,1.0,1,x",
            "line 3: feature column 'history' must be keys between '|', each an integer "
            "(strings need type = \"string\"), got '1|x'",
        ),
        (3, "0,5,a,,nan,1,x", "line 3: dense column 'age' must be a finite number, got 'nan'"),
        (
            3,
            "0,5,a,,,1,x",
            "line 3: dense column 'age' must be a finite number (fill empty cells before), got ''",
        ),
        (
            3,
            "0,5|6|7,a,,1.0,1,x",
            "line 3: feature column 'item_id' must be an integer (several keys in a cell need "
            "separator = \"|\"), got '5|6|7'",
        ),
        (3, "0,5,a,,-inf,1,x", "line 3: dense column 'age' must be a finite number, got '-inf'"),
        (3, "0,5,a,,1e39,1,x", "line 3: dense column 'age' must be a finite number, got '1e39'"),
        (3, "0,5,a,,old,1,x", "line 3: dense column 'age' must be a finite number, got 'old'"),
        (3, "0,5,a,,1.0,-1,x", "line 3: weight column 'w' must be a number >= 0, got '-1'"),
    ],
)
def test_wrong_cells(tmp_path: Path, name: str, line: int, cells: str, text: str) -> None:
    path = write_csv(tmp_path / name, changed(line, cells))
    with pytest.raises(DataError, match=f"^{re.escape(f'{path}, {text}')}$"):
        read_files(path, SCHEMA)


def test_lines_are_counted_as_an_editor_does(tmp_path: Path) -> None:
    lines = [*LINES[:2], "", '0,5,"two\nlines",,1.0,1,x', "7,5,a,,1.0,1,x"]
    path = write_csv(tmp_path / "a.csv", lines)
    with pytest.raises(DataError, match="line 6: label column 'click' must be 0 or 1, got '7'"):
        read_files(path, SCHEMA)


def test_an_empty_key_between_separators(tmp_path: Path) -> None:
    schema = ColumnSchema(features={"a": FeatureColumn(type="string", separator="|")})
    path = write_csv(tmp_path / "a.csv", ["label,a", "0,x|y", "1,x||y"])
    text = r"line 3: feature column 'a' must be keys between '\|', each not empty, got 'x\|\|y'"
    with pytest.raises(DataError, match=text):
        read_files(path, schema)


def test_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"label,a\n0,x\n1,\xff\n")
    schema = ColumnSchema(features={"a": FeatureColumn(type="string")})
    with pytest.raises(DataError, match="line 3: feature column 'a' must be UTF-8, got"):
        read_files(path, schema)


def test_missing_and_misnamed_columns(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", ["click,item,city", "0,1,x"])
    schema = ColumnSchema(label="click", features={"item": "itm"})
    text = f"{path}: there is no feature column 'itm'; did you mean 'item'? columns are "
    with pytest.raises(DataError, match=re.escape(text + "'click', 'item', 'city'")):
        read_files(path, schema)
    with pytest.raises(DataError, match="there is no label column 'label'; columns are 'click',"):
        read_files(path, ColumnSchema())
    parquet = write_parquet(tmp_path / "a.parquet", parquet_columns())
    with pytest.raises(DataError, match="no dense column 'agee'; did you mean 'age'"):
        read_files(parquet, ColumnSchema(label="click", dense=("agee",)))


def test_a_header_with_a_name_twice(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", ["label,a,a", "0,1,2"])
    with pytest.raises(DataError, match=r"a\.csv, line 1: column 'a' appears twice in the header"):
        read_files(path, ColumnSchema(features={"a": "a"}))


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.parquet"])
def test_missing_and_empty_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(DataError, match=f"{name}: no such file$"):
        read_files(path, SCHEMA)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=f"{name}: the file is empty$"):
        read_files(path, SCHEMA)
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match=f"{name}: not a file$"):
        read_files(path, SCHEMA)


def test_files_without_rows(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", LINES[:1])
    with pytest.raises(DataError, match=r"a\.csv: there are no rows$"):
        read_files(path, SCHEMA)
    empty_inside = tmp_path / "b.csv.gz"
    empty_inside.write_bytes(gzip.compress(b""))
    with pytest.raises(DataError, match=r"b\.csv\.gz: the file is empty$"):
        read_files(empty_inside, SCHEMA)
    with pytest.raises(DataError, match="no data files are given"):
        read_files([], SCHEMA)


def test_unknown_kinds_of_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.txt: unknown kind of file; known are \.csv, "):
        read_files(tmp_path / "a.txt", SCHEMA)


@pytest.mark.parametrize("share", [0.001, 0.3, 0.6, 0.9999])
def test_a_truncated_gz_is_never_a_short_epoch(tmp_path: Path, share: float) -> None:
    rng = np.random.default_rng(0)
    lines = ["label,a", *(f"{i % 2},{key}" for i, key in enumerate(rng.integers(0, 2**40, 20000)))]
    path = write_csv(tmp_path / "a.csv.gz", lines)
    data = path.read_bytes()
    cut = max(5, int(share * len(data)))
    path.write_bytes(data[:cut])
    text = rf"a\.csv\.gz: cannot be read: .* \(the file has {cut} bytes; is it complete\?\)"
    with pytest.raises(DataError, match=text):
        read_files(path, ColumnSchema(features={"a": "a"}))


def test_files_that_are_not_what_their_names_say(tmp_path: Path) -> None:
    for name in ("a.csv.gz", "a.parquet"):
        path = tmp_path / name
        path.write_bytes(b"label,a\n0,1\n")
        with pytest.raises(DataError, match=rf"{name}: .*(gzip|arquet)"):
            read_files(path, SCHEMA)


def test_a_truncated_parquet_file(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", parquet_columns())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet: "):
        read_files(path, SCHEMA)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"click": [1, 2, 0]}, "label column 'click' must be 0 or 1, got 2.0 at row 1"),
        ({"click": [1, None, 0]}, "column 'click' is null at row 1; fill or drop such rows"),
        ({"click": ["1", "0", "0"]}, "label column 'click' must hold numbers, got"),
        ({"item_id": [BIG, None, 3]}, "column 'item_id' is null at row 1; fill or drop"),
        ({"item_id": [1.0, 2.0, 3.0]}, "feature column 'item_id' must hold integers or strings"),
        (
            {"item_id": ["1", "2 3", "3"]},
            "feature column 'item_id' must hold integers, got 2 3 at row 1; several keys in a cell "
            'need separator = " "',
        ),
        (
            {"item_id": ["1", "x", "3"]},
            "feature column 'item_id' must hold integers, got x at row 1; strings need type",
        ),
        ({"city": [1, 2, 3]}, "feature column 'city' holds integers; say type = \"integer\""),
        ({"history": [[1], [2, None], []]}, "column 'history': null inside the list of bag 1"),
        ({"history": [["a"], [], []]}, "feature column 'history' holds strings; say type ="),
        ({"age": [0.0, 1.0, float("nan")]}, "dense column 'age' is nan at row 2; every value"),
        ({"age": [0.0, None, 1.0]}, "dense column 'age' is nan at row 1; every value"),
        ({"w": [1.0, 1.0, -0.5]}, "weight column 'w' must be >= 0, got -0.5 at row 2"),
    ],
)
@pytest.mark.parametrize("row_group_size", [1, 3])
def test_wrong_parquet_columns(
    tmp_path: Path, change: dict[str, Any], text: str, row_group_size: int
) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, parquet_columns(**change), row_group_size=row_group_size)
    with pytest.raises(DataError, match=re.escape(f"{path}: {text}")):
        read_files(path, SCHEMA)


def test_a_file_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_csv(tmp_path / "a.csv", LINES)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setitem(read_header.__globals__, "open_text", refuse)
    with pytest.raises(DataError, match=r"a\.csv: cannot be read: Permission denied \(the file"):
        read_files(path, SCHEMA)


def test_data_without_labels_are_for_streams(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("item,age\n7,0.5\n8,1.5\n")
    schema = ColumnSchema(label=None, dense=("age",), features={"item": "item"})
    (batch,) = stream_files(path, schema, 4)
    assert batch.labels.tolist() == [0.0, 0.0] and batch.features["item"].tolist() == [7, 8]
    message = "the schema names no label column; stream_files reads data without labels"
    for read in (lambda: read_files(path, schema), lambda: from_files(path, schema, 4)):
        with pytest.raises(DataError, match=message):
            read()
    path.write_text("item,age\n7,old\n")
    with pytest.raises(DataError, match="line 2: dense column 'age' must be a finite number"):
        list(stream_files(path, schema, 4))
