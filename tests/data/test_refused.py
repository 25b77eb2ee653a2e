# SPDX-License-Identifier: Apache-2.0
"""Input that used to be misread: refused by name and place, or read right."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxsparse.data import stream_files
from jaxsparse.data.arrays import from_arrays
from jaxsparse.data.batch import Batch
from jaxsparse.data.files import read_files
from jaxsparse.data.schema import ColumnSchema, DataError, FeatureColumn
from jaxsparse.hashing import Hashed, Identity
from jaxsparse.ragged import Ragged

INTEGERS = ColumnSchema(features={"a": "a"})
BAGS = ColumnSchema(features={"a": FeatureColumn(separator="|")})
STRING_BAGS = ColumnSchema(features={"a": FeatureColumn(type="string", separator="|")})
DENSE = ColumnSchema(features={"a": "a"}, dense=("d",))
STRINGS = ColumnSchema(features={"a": FeatureColumn(type="string")})


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_column(path: Path, column: Any, name: str = "a") -> Path:
    table = pa.table({"label": [i % 2 for i in range(len(column))], name: column})
    pq.write_table(table, path)
    return path


def read_both(path: Path | list[Path], schema: ColumnSchema) -> Any:
    """The columns, which the streaming reader must agree on."""
    columns = read_files(path, schema)
    paths = list(map(str, path)) if isinstance(path, list) else str(path)
    (batch,) = stream_files(paths, schema, len(columns["label"]))
    for name, streamed in batch.features.items():
        read = columns[name]
        both = [c.values if isinstance(c, Ragged) else c for c in (read, streamed)]
        assert both[0].tolist() == both[1].tolist()
    return columns


def refused_by_both(path: Path | list[Path], schema: ColumnSchema, text: str) -> None:
    """Both readers refuse; ``text`` must be in the message of either."""
    with pytest.raises(DataError, match=text):
        read_files(path, schema)
    paths = list(map(str, path)) if isinstance(path, list) else str(path)
    with pytest.raises(DataError, match=text):
        list(stream_files(paths, schema, 4))


@pytest.mark.parametrize(
    ("schema", "line", "text"),
    [
        (INTEGERS, "1,0X10", r"line 3: feature column 'a' must be an integer .* got '0X10'"),
        (BAGS, "1,1|0X2", r"line 3: feature column 'a' must be keys between '\|', each an integer"),
        (INTEGERS, "1," + "9" * 5000, "line 3: feature column 'a' must be an integer of 64 bits"),
        (INTEGERS, "0.99999999999,1", "line 3: label column 'label' must be 0 or 1, got '0.9999"),
        (INTEGERS, "1e-60,1", "line 3: label column 'label' must be 0 or 1, got '1e-60'"),
        (INTEGERS, f"1,{2**64 - 1}", "line 3: .* signed or all unsigned .* has -1 above, got 1844"),
        (BAGS, f"1,4|{2**64 - 1}", "line 3: .* signed or all unsigned .* has -1 above, got 1844"),
        (INTEGERS, "7," + "9" * 200_000, "line 3: label column 'label' must be 0 or 1, got '7'"),
    ],
)
def test_csv_cells(tmp_path: Path, schema: ColumnSchema, line: str, text: str) -> None:
    path = write_lines(tmp_path / "a.csv", "label,a", "0,-1", line)
    refused_by_both(path, schema, r"a\.csv, " + text)


@pytest.mark.parametrize("cell", ["1_0", "\u0661", "1\u00a0"])
def test_numbers_that_only_python_knows(tmp_path: Path, cell: str) -> None:
    path = write_lines(tmp_path / "a.csv", "label,a,d", "0,1,1.5", f"1,2,{cell}")
    refused_by_both(path, DENSE, r"a\.csv, line 3: dense column 'd' must be a finite number, got '")


def test_numbers_that_arrow_knows_pass_the_scan_for_errors(tmp_path: Path) -> None:
    cells = ["+1", " 1 ", "1.", ".5", "1E+3", "00.5"]
    lines = [f"0,1,{cell}" for cell in cells]
    path = write_lines(tmp_path / "a.csv", "label,a,d", *lines)
    assert read_both(path, DENSE)["d"].tolist() == [1, 1, 1, 0.5, 1000, 0.5]
    write_lines(path, "label,a,d", *lines, "0,x,1")
    refused_by_both(path, DENSE, r"a\.csv, line 8: feature column 'a'")


def test_keys_without_a_common_dtype_in_two_files(tmp_path: Path) -> None:
    signed = write_lines(tmp_path / "a.csv", "label,a", "0,-5", "1,3")
    unsigned = write_lines(tmp_path / "b.csv", "label,a", f"0,{2**64 - 1}")
    text = r"'a' differs .*integers such as -5 in .*a\.csv.*, integers such as 1844\d* in .*b\.csv"
    refused_by_both([signed, unsigned], INTEGERS, text)


def test_long_cells_and_headers(tmp_path: Path) -> None:
    long = "x" * 200_000
    path = write_lines(tmp_path / "a.csv", f"label,a,{long}", f"0,{long},1", "1,y,1")
    assert read_both(path, STRINGS)["a"].tolist() == [long, "y"]
    write_lines(path, f"label,a,{long}", f"0,{long},1", "1,y")
    refused_by_both(path, STRINGS, r"a\.csv, line 3: expected 3 columns, got 2")


def test_a_blank_header(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.csv", "", "label,a", "0,1")
    refused_by_both(path, INTEGERS, r"a\.csv, line 1: the header line is blank; it must name")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("label,a\n0,1\n".encode("utf-16"), "the file is UTF-16; save it as UTF-8"),
        (
            gzip.compress(b"label,a\n0,1\n", mtime=0),
            r"the file is gzipped; let its name end with \.csv\.gz",
        ),
        (b"PAR1....", r"this is a Parquet file; let its name end with \.parquet"),
    ],
)
def test_files_that_are_no_text(tmp_path: Path, data: bytes, text: str) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    refused_by_both(tmp_path / "a.csv", INTEGERS, r"a\.csv: " + text)


def test_names_in_capitals(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "A.CSV", "label,a", "0,1")
    packed = tmp_path / "B.CSV.GZ"
    packed.write_bytes(gzip.compress(b"label,a\n0,2\n"))
    table = write_column(tmp_path / "C.PARQUET", [3])
    assert read_both([plain, packed, table], INTEGERS)["a"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("delimiter", ["é", '"', "\n", "\0", ""])
def test_delimiters(delimiter: str) -> None:
    with pytest.raises(ValueError, match="delimiter must be one ASCII character other than"):
        ColumnSchema(delimiter=delimiter)


TEXTS = {
    "dictionary": lambda cells: pa.array(cells).dictionary_encode(),
    "pandas": lambda cells: pa.array(pd.Series(cells, dtype="category"), from_pandas=True),
    "binary": lambda cells: pa.array([cell.encode() for cell in cells], pa.binary()),
    "large_binary": lambda cells: pa.array([cell.encode() for cell in cells], pa.large_binary()),
    "string_view": lambda cells: pa.array(cells).cast(pa.string_view()),
}


@pytest.mark.parametrize("text", TEXTS)
def test_parquet_text_of_any_encoding_is_split_and_read(tmp_path: Path, text: str) -> None:
    bags = write_column(tmp_path / "bags.parquet", TEXTS[text](["1|2", "", "3", "1|2"]))
    assert read_both(bags, BAGS)["a"].lengths.tolist() == [2, 0, 1, 2]
    read = read_both(bags, STRING_BAGS)["a"]
    assert read.values.tolist() == ["1", "2", "3", "1", "2"]
    digits = write_column(tmp_path / "digits.parquet", TEXTS[text](["7", "-1", "7"]))
    assert read_both(digits, INTEGERS)["a"].tolist() == [7, -1, 7]
    filled = ColumnSchema(features={"a": FeatureColumn(missing=9)})
    assert read_both(digits, filled)["a"].tolist() == [7, -1, 7]
    wrong = write_column(tmp_path / "wrong.parquet", TEXTS[text](["7", "0X1"]))
    refused_by_both(wrong, INTEGERS, "0X1")


def test_parquet_lists_of_text_and_bytes_with_a_separator(tmp_path: Path) -> None:
    lists = write_column(tmp_path / "a.parquet", [["x|y"], []])
    refused_by_both(lists, STRING_BAGS, "column 'a' holds list<.*string>, whose lists need no sep")
    data = write_column(tmp_path / "b.parquet", pa.array([b"\xff", b"1"]))
    refused_by_both(data, STRING_BAGS, "feature column 'a' holds bytes that are no UTF-8")


def test_a_null_where_cells_are_split(tmp_path: Path) -> None:
    path = write_column(tmp_path / "a.parquet", ["x|y", "z", None])
    refused_by_both(path, STRING_BAGS, r"a\.parquet.*(null at row 2|row 2: .* got null)")


def test_bad_cells_of_parquet_bags_are_skipped(tmp_path: Path) -> None:
    path = write_column(tmp_path / "a.parquet", ["1|2", "1|x", "3||4", None, "5"])
    stream = stream_files(str(path), BAGS, 2, on_bad_row="skip")
    (batch,) = stream
    assert [bag.tolist() for bag in batch.features["a"]] == [[1, 2], [5]]
    assert "row 1: feature column 'a' must be integer keys between '|', got 1|x" in str(
        stream.bad_rows.report()
    )


def test_parquet_labels_are_checked_before_they_are_rounded(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": [0.0, 0.99999999999], "a": [1, 2]}), path)
    refused_by_both(path, INTEGERS, "label column 'label' must be 0 or 1, got 0.99999999999")


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    table = pa.table([[0, 1], [1, 2], [3, 4]], names=["label", "a", "a"])
    pq.write_table(table, tmp_path / "a.parquet")
    refused_by_both(tmp_path / "a.parquet", INTEGERS, r"a\.parquet: there are 2 columns 'a'")
    with pytest.raises(ValueError, match="two columns are named 'a'; rename one"):
        from_arrays(table, 2)
    with pytest.raises(TypeError, match=r"column names must be str, got 1 \(int\)"):
        from_arrays({1: [1, 2], "1": [3, 4], "label": [0, 1]}, 2)


MASKED = np.ma.array([1, 0, 1], mask=[False, True, False])


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: from_arrays({"a": MASKED, "label": [0, 1, 0]}, 2), "column 'a' must have"),
        (lambda: from_arrays({"a": [1, 2, 3], "label": MASKED}, 2), "column 'label' must have"),
        (lambda: Batch({"a": [1, 2, 3]}, labels=MASKED), "Batch: labels must have"),
        (lambda: Batch({"a": [1, 2, 3]}, labels={"x": MASKED}), r"labels\['x'\] must have"),
        (lambda: Batch({"a": [1, 2, 3]}, MASKED[:, None], [0, 1, 0]), "Batch: dense must have"),
        (lambda: Batch({"a": [1, 2, 3]}, None, [0, 1, 0], MASKED), "Batch: weights must have"),
        (lambda: Batch({"a": MASKED}, labels=[0, 1, 0]), r"features\['a'\] must have"),
        (lambda: Ragged(MASKED, np.array([0, 3])), "keys must have"),
        (lambda: Ragged([1, 2, 3], np.array([0, 3]), MASKED), "`weights` must have"),
        (lambda: Ragged.from_lengths([1, 2, 3], MASKED), "`lengths` must have"),
        (lambda: Ragged.from_lists([[1], MASKED]), "keys must have|bag 1 must have"),
        (lambda: Hashed().rows(MASKED, 9), "keys must have"),
        (lambda: Identity().rows(MASKED, 9), "keys must have"),
    ],
)
def test_masked_entries(use: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"({text}) no masked entries, got one at position"):
        use()


def test_a_masked_array_without_masked_entries_is_an_array() -> None:
    assert from_arrays({"a": np.ma.array([1, 2]), "label": [0, 1]}, 2).num_rows == 2


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("labels", ["1", "0"], "must hold real numbers or bools, got dtype <U1"),
        ("labels", np.array([0, 1], "datetime64[s]"), r"got dtype datetime64\[s\]"),
        ("labels", [1j, 0], "got dtype complex128"),
        ("labels", [None, 1], "got dtype object"),
        ("labels", [0, 1e300], "must fit float32, got 1e.300"),
        ("weights", ["1", "2"], "got dtype <U1"),
        ("weights", [3e38, 3e38], r"weights add up to 6e\+38, which is beyond float32"),
        ("dense", [["1"], ["2"]], "got dtype <U1"),
    ],
)
def test_columns_of_a_batch(name: str, values: Any, text: str) -> None:
    columns: dict[str, Any] = {"labels": [0, 1], name: values}
    with pytest.raises(ValueError, match=f"Batch: {name} .*{text}|Batch: {text}"):
        Batch({"a": [1, 2]}, **columns)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64", "bfloat16"])
def test_real_dtypes_of_a_batch(dtype: str) -> None:
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    batch = Batch({"a": [1, 2]}, labels=np.array([0, 1]).astype(kind))
    assert batch.labels.dtype == np.float32
    assert batch.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    "column",
    [
        pd.Index([7, 8, 9]),
        pd.array([7, 8, 9], dtype="Int64"),
        pd.Series([7, 8, 9]),
        pa.array([7, 8, 9]),
        pa.chunked_array([[7], [8, 9]]),
    ],
)
def test_columns_of_many_kinds_in_a_dict(column: Any) -> None:
    assert from_arrays({"a": column, "label": [0, 1, 0]}, 3).rows.features["a"].tolist() == [
        7,
        8,
        9,
    ]


def test_nulls_in_a_dict_are_as_in_a_table() -> None:
    labels = [0, 1, 0]
    with pytest.raises(ValueError, match="column 'a' is null at row 1"):
        from_arrays({"a": pa.array([1, None, 3]), "label": labels}, 2)
    lists = [[1, 2], None, [3]]
    for data in ({"a": lists}, pa.table({"a": lists}), {"a": pa.array(lists)}):
        columns = {"a": data["a"], "label": labels}
        assert from_arrays(columns, 3).rows.features["a"].lengths.tolist() == [2, 0, 1]


def test_bags_without_an_order() -> None:
    with pytest.raises(TypeError, match=r"column 'a': .* got the set \{1\} at bag 1, whose order"):
        from_arrays({"a": [[2], {1}], "label": [0, 1]}, 2)
    with pytest.raises(TypeError, match=re.escape("got the dict {1: 2} at bag 0, whose order")):
        Ragged.from_lists([{1: 2}])  # type: ignore[list-item]


def test_polars_lists_of_categories_and_wide_integers() -> None:
    lists = pl.Series([["x"], [], ["y", "x"]], dtype=pl.List(pl.Categorical))
    frame = pl.DataFrame({"a": lists, "label": [0, 1, 0]})
    for data in (frame, {"a": lists, "label": [0, 1, 0]}):
        bags = from_arrays(data, 3).rows.features["a"]
        assert [bag.tolist() for bag in bags] == [["x"], [], ["y", "x"]]
    wide = pl.Series([1, 2**100], dtype=pl.Int128)
    with pytest.raises(TypeError, match="column 'a' of type Int128 cannot be read"):
        from_arrays({"a": wide, "label": [0, 1]}, 2)
    with pytest.raises(TypeError, match=r"the table with columns of .*Int128.* cannot be read"):
        from_arrays(pl.DataFrame({"a": wide, "label": [0, 1]}), 2)


def test_a_series_of_mixed_values_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"column 'a' of type object cannot be read: "):
        from_arrays({"a": pd.Series(["x", 1]), "label": [0, 1]}, 2)
