# SPDX-License-Identifier: Apache-2.0
"""Files that are streamed: text in blocks, CSV, Parquet, URLs, and rows that are bad."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxsparse.data import (
    ColumnSchema,
    DataError,
    FeatureColumn,
    StreamDataset,
    read_files,
    stream_criteo,
    stream_files,
)
from jaxsparse.data.criteo import CriteoParser
from jaxsparse.data.csv_blocks import CsvParser
from jaxsparse.data.joining import join_batches
from jaxsparse.data.sources import find_sources
from jaxsparse.data.text_blocks import TextFormat
from tests.data.files import (
    IDS,
    criteo_bytes,
    criteo_cells,
    flat,
    ids_of,
    write_bytes,
    write_ids,
)


def small_blocks(paths: Any, batch_size: int, **options: Any) -> StreamDataset:
    """A dataset whose text blocks are a few rows long."""
    form = TextFormat(CriteoParser(on_bad_row=options.pop("on_bad_row", "error")), 600)
    return StreamDataset([(source, form) for source in find_sources(paths)], batch_size, **options)


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
@pytest.mark.parametrize("members", [1, 6])
def test_blocks_of_text(tmp_path: Path, name: str, members: int) -> None:
    rows = criteo_cells(60)
    path = write_bytes(tmp_path / name, criteo_bytes(rows), members)
    expected = flat(ids_of(stream_criteo(path, 8), "C1"))
    assert expected == list(range(60))
    dataset = small_blocks(path, 8)
    assert flat(ids_of(dataset, "C1")) == expected
    mixed = small_blocks(path, 8, shuffle=True, shuffle_rows=16)
    epochs = [flat(ids_of(mixed, "C1")) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == expected
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_lines_are_numbered_over_blocks(tmp_path: Path, name: str) -> None:
    lines = criteo_bytes(criteo_cells(60)).splitlines(keepends=True)
    lines[41] = b"0\n"
    path = write_bytes(tmp_path / name, b"".join(lines))
    with pytest.raises(DataError, match=r"line 42: expected 40 columns, got 1"):
        list(small_blocks(path, 8))
    dataset = small_blocks(path, 8, on_bad_row="skip", shuffle=True)
    assert sorted(flat(ids_of(dataset, "C1"))) == [k for k in range(60) if k != 41]


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = write_ids(tmp_path / "a.csv", range(10, 50))
    dataset = stream_files(path, IDS, 8)
    write_ids(path, range(10, 30))
    with pytest.raises(DataError, match="rows where 40 were counted; has the file changed"):
        list(dataset)


def test_globs_and_urls(tmp_path: Path) -> None:
    write_ids(tmp_path / "b.parquet", range(5, 9))
    write_ids(tmp_path / "a.parquet", range(5))
    pattern = str(tmp_path / "*.parquet")
    assert flat(ids_of(stream_files(pattern, IDS, 4))) == list(range(9))
    with pytest.raises(DataError, match=r"\*\.csv: no file matches"):
        stream_files(str(tmp_path / "*.csv"), IDS, 4)
    with pytest.raises(DataError, match=r"c\.parquet: no such file"):
        stream_files(tmp_path / "c.parquet", IDS, 4)
    with pytest.raises(DataError, match="not a file"):
        stream_files(tmp_path, IDS, 4)
    with pytest.raises(DataError, match="unknown kind of file; known are"):
        stream_files(write_bytes(tmp_path / "a.txt", b"x"), IDS, 4)
    with pytest.raises(DataError, match="no data files are given"):
        stream_files([], IDS, 4)


def test_urls_through_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for name in ("a.parquet", "b.parquet"):
        memory.pipe(f"/jaxsparse/{name}", write_ids(tmp_path / name, range(6)).read_bytes())
    memory.pipe("/jaxsparse/c.tsv.gz", gzip.compress(criteo_bytes(criteo_cells(9))))
    try:
        dataset = stream_files("memory://jaxsparse/*.parquet", IDS, 4)
        assert flat(ids_of(dataset)) == [*range(6), *range(6)]
        assert dataset.files[0] == "memory://jaxsparse/a.parquet"
        criteo = stream_criteo("memory://jaxsparse/c.tsv.gz", 4)
        assert flat(ids_of(criteo, "C1")) == list(range(9))
        with pytest.raises(DataError, match=r"memory://jaxsparse/d\.parquet: no such file"):
            stream_files("memory://jaxsparse/d.parquet", IDS, 4)
        with pytest.raises(DataError, match="nosuch"):
            stream_files("nosuch://x/d.parquet", IDS, 4)
    finally:
        memory.rm("/jaxsparse", recursive=True)


SCHEMA = ColumnSchema(
    label="click",
    dense=("age",),
    weight="w",
    features={
        "item": FeatureColumn(column="item", missing=99),
        "city": FeatureColumn(type="string"),
        "tags": FeatureColumn(separator="|"),
    },
)
CSV = "\n".join(
    [
        "click,item,city,tags,age,w",
        '1,7,"a, ""b""",1|2,0.5,1',
        "",
        '0,,"two',
        'lines",,1,0',
        "1,18446744073709551615,x,5,-1,2",
        "",
    ]
)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("block_bytes", [16, 40, 4096])
def test_csv(tmp_path: Path, name: str, block_bytes: int) -> None:
    path = write_bytes(tmp_path / name, CSV.encode())
    form = TextFormat(CsvParser(SCHEMA), block_bytes)
    dataset = StreamDataset([(source, form) for source in find_sources(path)], 1)
    batches = list(dataset)
    assert [b.features["item"][0] for b in batches] == [7, 99, 2**64 - 1]
    assert [b.features["city"][0] for b in batches] == ['a, "b"', "two\nlines", "x"]
    assert [b.features["tags"].values.tolist() for b in batches] == [[1, 2], [], [5]]
    assert [b.dense.tolist() for b in batches] == [[[0.5]], [[1]], [[-1]]]
    assert [b.weights.tolist() for b in batches] == [[1], [0], [2]]


def test_csv_like_the_reader_in_memory(tmp_path: Path) -> None:
    path = write_bytes(tmp_path / "a.csv", CSV.replace(",,", ",3,").encode())
    schema = ColumnSchema(label="click", features={"item": "item", "city": SCHEMA.features["city"]})
    columns = read_files(path, schema)
    batch = join_batches(list(stream_files(path, schema, 2)))
    assert batch.features["item"].tolist() == columns["item"].tolist()
    assert batch.features["city"].tolist() == columns["city"].tolist()


def test_bad_csv_rows(tmp_path: Path) -> None:
    lines = CSV.splitlines(keepends=True)
    bad = ["2,1,x,,1,1\n", "1,x,y,,1,1\n", "1,1,1\n", '1,1,"\n\n",,nan,1\n']
    path = write_bytes(tmp_path / "a.csv", "".join([*lines[:3], *bad, *lines[3:]]).encode())
    with pytest.raises(DataError, match=r"line 4: label column 'click' must be 0 or 1, got '2'"):
        list(stream_files(path, SCHEMA, 2))
    dataset = stream_files(path, SCHEMA, 2, on_bad_row="skip")
    assert dataset.num_rows == 3
    assert join_batches(list(dataset)).labels.tolist() == [1, 0, 1]
    found = dataset.bad_rows.report()
    assert [entry["rows"] for entry in found.values()] == [1] * 4
    texts = " ".join(entry["example"] for entry in found.values())
    assert "a.csv, line 5: feature column 'item' must be an integer" in texts
    assert "a.csv, line 6: expected 6 columns, got 3" in texts
    assert "a.csv, line 9: dense column 'age' must be a finite number, got 'nan'" in texts


def test_signed_beside_unsigned_keys(tmp_path: Path) -> None:
    lines = ["label,id\n", *["0,1\n"] * 5, f"1,{2**64 - 1}\n"]
    path = write_bytes(tmp_path / "a.csv", "".join(lines).encode())
    form = TextFormat(CsvParser(IDS), 16)
    batches = list(StreamDataset([(source, form) for source in find_sources(path)], 6))
    assert flat(ids_of(batches)) == [1] * 5 + [2**64 - 1]
    path = write_bytes(path, "".join([*lines[:5], "0,-1\n", lines[-1]]).encode())
    with pytest.raises(DataError, match=r"column 'id' .*int64 and uint64 have no exact"):
        list(StreamDataset([(source, form) for source in find_sources(path)], 6))


def test_a_quote_that_is_not_doubled(tmp_path: Path) -> None:
    schema = ColumnSchema(features={"disk": FeatureColumn(type="string")})
    path = write_bytes(tmp_path / "a.csv", b'label,disk\n0,5" disk\n1,3 disk\n')
    with pytest.raises(DataError, match=r"lines from 2 on: .* a quote that is not doubled"):
        list(stream_files(path, schema, 2))


def test_a_missing_column(tmp_path: Path) -> None:
    schema = ColumnSchema(features={"id": "idd"})
    for name in ("a.csv", "a.parquet"):
        path = write_ids(tmp_path / name, range(3))
        with pytest.raises(DataError, match=rf"{name}: there is no feature column 'idd'; did you"):
            stream_files(path, schema, 2)


def test_bad_parquet_rows(tmp_path: Path) -> None:
    table = pa.table(
        {
            "click": [1, 2, 0, 1, 1, None],
            "item": ["5", "6", "x", "7", "8", "9"],
            "tags": [[1], [2], [3], [4, None], None, [6]],
            "age": [0.0, 1.0, 2.0, 3.0, float("nan"), 5.0],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    schema = ColumnSchema(label="click", dense=("age",), features={"item": "item", "tags": "tags"})
    with pytest.raises(DataError, match=r"a\.parquet, row 1: label column 'click' must be 0 or 1"):
        list(stream_files(tmp_path / "a.parquet", schema, 2))
    dataset = stream_files(tmp_path / "a.parquet", schema, 2, on_bad_row="skip")
    assert join_batches(list(dataset)).features["item"].tolist() == [5]
    texts = " ".join(dataset.bad_rows.examples.values())
    assert dataset.bad_rows.total == 5
    assert "row 2: feature column 'item' must be an integer of 64 bits, got x" in texts
    assert "row 3: feature column 'tags' must be keys without nulls, got [4, None]" in texts
    assert "row 4: dense column 'age' must be a finite number, got nan" in texts


def test_keys_beyond_a_limit(tmp_path: Path) -> None:
    """What tables with identity keys would refuse is named with its place in the file."""
    features = {"a": FeatureColumn(limit=8), "b": FeatureColumn(limit=8, separator="|")}
    schema = ColumnSchema(features=features)
    path = write_bytes(tmp_path / "a.csv", b"label,a,b\n0,1,2|3\n0,8,\n1,7,1|-1\n1,7,7\n")
    with pytest.raises(DataError, match=r"a\.csv, line 3: .* 'a' must be in 0\.\.7, got '8'"):
        list(stream_files(path, schema, 2))
    skipping = stream_files(path, schema, 2, on_bad_row="skip")
    assert (skipping.num_rows, skipping.bad_rows.total) == (2, 2)
    keys = pa.array([1, 2**63, 7, 0], pa.uint64())
    table = pa.table({"label": [0] * 4, "a": keys, "b": [[1], [2], [3, 9], None]})
    pq.write_table(table, tmp_path / "a.parquet")
    text = rf"a\.parquet, row 1: .* 'a' must be in 0\.\.7, got {2**63}"
    with pytest.raises(DataError, match=text):
        list(stream_files(tmp_path / "a.parquet", schema, 2))
    skipping = stream_files(tmp_path / "a.parquet", schema, 2, on_bad_row="skip")
    assert (skipping.num_rows, skipping.bad_rows.total) == (2, 2)
    with pytest.raises(DataError, match=r"line 3: .* 'a' must be in 0\.\.7, got '8'"):
        read_files(path, schema)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"limit": 0}, "limit must be >= 1 and is for integers, got 0"),
        ({"limit": 5, "type": "string"}, "limit must be >= 1 and is for integers, got 5"),
        ({"missing": "x"}, "missing must be a key of type integer, got 'x'"),
        ({"missing": 1, "type": "string"}, "missing must be a key of type string, got 1"),
        ({"missing": 1, "separator": "|"}, "missing is for single keys"),
    ],
)
def test_columns(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FeatureColumn(**options)


def test_broken_parquet_files(tmp_path: Path) -> None:
    path = write_ids(tmp_path / "a.parquet", range(5000), row_group_size=500)
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    with pytest.raises(DataError, match=r"a\.parquet: "):
        stream_files(path, IDS, 4)
    broken = bytearray(data)
    broken[3000:3400] = bytes(400)
    path.write_bytes(broken)
    with pytest.raises(DataError, match=r"a\.parquet: "):
        list(stream_files(path, IDS, 4))


def test_keys_of_a_wrong_kind(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [0], "id": [1.0]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="feature column 'id' must hold integers or strings"):
        stream_files(tmp_path / "a.parquet", IDS, 1, on_bad_row="skip")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("lines", "blank"),
    [
        (["a", "", "b"], [3]),
        (["", "a"], [2]),
        (["a", "b", ""], [4]),
        (["a", "", "", "b", "", ""], [3, 4, 6, 7]),
        (["", ""], [2, 3]),
    ],
)
@pytest.mark.parametrize("block_bytes", [3, 1 << 20])
def test_blank_lines_of_a_single_column_are_bad_rows(
    tmp_path: Path, lines: list[str], blank: list[int], end: str, block_bytes: int
) -> None:
    schema = ColumnSchema(label=None, features={"s": FeatureColumn(type="string")})
    path = write_bytes(tmp_path / "a.csv", end.join(["s", *lines, ""]).encode())

    def opened(on_bad_row: Any) -> StreamDataset:
        form = TextFormat(CsvParser(schema, on_bad_row), block_bytes)
        return StreamDataset([(source, form) for source in find_sources(path)], 10)

    # Those at the end are met first, when rows are counted.
    line = "|".join(map(str, blank))
    text = rf"a\.csv, line ({line}): the line is blank; in a file of one column an empty cell is"
    with pytest.raises(DataError, match=text):
        list(opened("error"))
    skipping = opened("skip")
    kept = [str(key) for batch in skipping for key in batch.features["s"]]
    assert kept == [line for line in lines if line]
    assert skipping.bad_rows.counts == {"blank line": len(blank)}
    quoted = [line or '""' for line in lines]
    write_bytes(path, end.join(["s", *quoted, ""]).encode())
    kept = [str(key) for batch in opened("error") for key in batch.features["s"]]
    assert kept == lines
