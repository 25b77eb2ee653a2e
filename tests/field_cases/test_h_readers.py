# SPDX-License-Identifier: Apache-2.0
"""Field cases H: what broke readers of Criteo's format and of Parquet.

Decided here: a dense x becomes log(1 + max(x, 0)) and a missing one 0; a missing category is a key
of its own; "NA" is text like any other, hence no number; truncated files are errors under every
policy. Nothing is preprocessed, and indexing leaves no file behind (H08).
Vocabularies (H10, H11) count nulls apart; of keys that came equally often the smaller is first.
"""

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

import jaxsparse as js
from jaxsparse.data import (
    ColumnSchema,
    DataError,
    FeatureColumn,
    StreamDataset,
    read_files,
    stream_criteo,
    stream_files,
)
from jaxsparse.data.criteo import CATEGORIES, COLUMNS, MISSING
from jaxsparse.data.joining import join_batches
from jaxsparse.data.parquet_blocks import ParquetFormat
from jaxsparse.data.sources import find_sources
from jaxsparse.hashing import fingerprint64
from jaxsparse.ragged import Ragged
from tests.data.files import (
    criteo_bytes,
    criteo_cells,
    expected_criteo,
    flat,
    ids_of,
    write_bytes,
    write_ids,
)


def test_h08_a_reader_that_died_leaves_nothing_for_the_next_to_trip_over(tmp_path: Path) -> None:
    path = write_bytes(tmp_path / "day.tsv.gz", criteo_bytes(criteo_cells(40)), members=3)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    clean = read(stream_criteo(path, 7))
    for number in range(4):  # dies at the n-th batch
        batches = iter(stream_criteo(path, 7))
        for _ in range(number):
            next(batches)
        del batches
        assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
        again = read(stream_criteo(path, 7))
        np.testing.assert_array_equal(again.dense, clean.dense)
        assert again.features.keys() == clean.features.keys()


def counted(keys: Any) -> dict[str, int]:
    seen = js.KeyCounts()
    seen.update(keys)
    nulls = {"null": seen.num_nulls} if seen.num_nulls else {}
    return dict(zip(seen.top(), seen.counts(), strict=True)) | nulls


def test_h10_counts_with_and_without_nulls() -> None:
    for make in (list, pa.array, pd.Series, pl.Series):
        assert counted(make(["a", "a", None, "b"])) == {"a": 2, "b": 1, "null": 1}
        assert counted(make(["a", "a", "b"])) == {"a": 2, "b": 1}


def test_h11_the_most_frequent_are_kept_and_ties_are_ordered() -> None:
    seen = js.KeyCounts()
    seen.update(["a", *"b" * 5, *"c" * 3])
    assert seen.top(2).tolist() == ["b", "c"]
    seen.update(["d", *"a" * 2, "0"])
    assert seen.top(3).tolist() == ["b", "a", "c"]
    assert seen.top().tolist() == ["b", "a", "c", "0", "d"]


BIG = 720575940631797753  # float64 would make it ...760


def read(dataset: StreamDataset) -> Any:
    """All rows as one batch."""
    return join_batches(list(dataset))


def criteo(path: Path, data: bytes, **options: Any) -> StreamDataset:
    return stream_criteo(write_bytes(path, data), 7, **options)


def assert_rows(dataset: StreamDataset, rows: list[list[str]]) -> None:
    """The dataset holds exactly these rows of Criteo's format, in order."""
    batch = read(dataset)
    labels, dense, keys = zip(*map(expected_criteo, rows), strict=True)
    assert batch.labels.tolist() == list(labels)
    np.testing.assert_allclose(batch.dense, dense, rtol=1e-6)
    assert np.stack([batch.features[name] for name in CATEGORIES], 1).tolist() == list(keys)


def test_h01_dense_values_are_finite(tmp_path: Path) -> None:
    values = ["", "-1", "-2", "-3", "-100", "0", "2147483647"]
    rows = criteo_cells(len(values))
    for cells, value in zip(rows, values, strict=True):
        cells[3] = value
    batch = read(criteo(tmp_path / "a.tsv", criteo_bytes(rows)))
    expected = np.float32([0, 0, 0, 0, 0, 0, np.log1p(np.float64(2147483647))])
    assert batch.dense[:, 2].tolist() == expected.tolist()


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("share", [0.001, 0.6, 0.9999])
def test_h04_a_truncated_gz(tmp_path: Path, members: int, share: float, on_bad_row: Any) -> None:
    path = write_bytes(tmp_path / "a.tsv.gz", criteo_bytes(criteo_cells(300)), members)
    data = path.read_bytes()
    cut = int(share * len(data))
    path.write_bytes(data[:cut])
    text = rf"a\.tsv\.gz: cannot be read: the gzip data ends at byte {cut}, inside the member that "
    with pytest.raises(DataError, match=text):
        stream_criteo(path, 7, on_bad_row=on_bad_row)


def test_h04_a_damaged_gz(tmp_path: Path) -> None:
    path = write_bytes(tmp_path / "a.tsv.gz", criteo_bytes(criteo_cells(300)))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"the gzip data is damaged: .*, near byte"):
        stream_criteo(path, 7)
    path.write_bytes(gzip.compress(b"") + b"rubbish")
    with pytest.raises(DataError, match=r"the gzip data is damaged: .*, near byte 20"):
        stream_criteo(path, 7)


@pytest.mark.parametrize("last", ["deadbeef", ""])
def test_h05_ends_of_lines(tmp_path: Path, last: str) -> None:
    rows = criteo_cells(4)
    for cells in rows:
        cells[-1] = last
    lines = [criteo_bytes([cells]) for cells in rows]
    crlf = [line.replace(b"\n", b"\r\n") for line in lines]
    for name, parts in {"lf": lines, "crlf": crlf, "mixed": [*lines[:2], *crlf[2:]]}.items():
        assert_rows(criteo(tmp_path / f"{name}.tsv", b"".join(parts)), rows)
        # The last line may lack its end.
        assert_rows(criteo(tmp_path / f"{name}.tsv", b"".join(parts).rstrip(b"\r\n")), rows)


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_h06_a_byte_order_mark(tmp_path: Path, name: str) -> None:
    rows = criteo_cells(3)
    bom, header = b"\xef\xbb\xbf", criteo_bytes([COLUMNS])
    assert_rows(criteo(tmp_path / name, bom + criteo_bytes(rows)), rows)
    with_header = bom + header + criteo_bytes(rows)
    assert_rows(criteo(tmp_path / name, with_header, header=True), rows)
    with pytest.raises(DataError, match="line 1: label must be 0 or 1, got 'label'"):
        read(criteo(tmp_path / name, with_header))


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
@pytest.mark.parametrize(
    ("reason", "line", "text"),
    [
        ("blank line", b"", "the line is blank"),
        ("number of columns", b"\t".join([b"0"] * 39), "expected 40 columns, got 39"),
        ("number of columns", b"\t".join([b"0"] * 41), "expected 40 columns, got 41"),
        ("label", b"2" + b"\t" * 39, "label must be 0 or 1, got '2'"),
        ("label", b"" + b"\t" * 39, "label must be 0 or 1, got ''"),
        (
            "integer",
            b"1\t\t1.5" + b"\t" * 37,
            "column I2 must be an integer or empty, got '1.5'",
        ),
        ("integer", b"1\t0x1f" + b"\t" * 38, "column I1 must be an integer or empty, got '0x1f'"),
        (
            "category",
            b"1" + b"\t" * 14 + b"12345\xff" + b"\t" * 25,
            r"column C1 must be up to 8 hexadecimal digits or empty, got '12345\\xff'",
        ),
        (
            "category",
            b"1" + b"\t" * 39 + b"123456789",
            "column C26 must be up to 8 hexadecimal digits or empty, got '123456789'",
        ),
        (
            "category",
            b"1" + b"\t" * 38 + b"ab\rcd\t",
            r"column C25 must be up to 8 hexadecimal digits or empty, got 'ab\rcd'",
        ),
    ],
)
def test_h07_bad_lines(tmp_path: Path, name: str, reason: str, line: bytes, text: str) -> None:
    rows = criteo_cells(20)
    good = criteo_bytes(rows).splitlines(keepends=True)
    data = b"".join([*good[:8], line + b"\n", *good[8:15], line + b"\r\n", *good[15:], b"\n\r\n\n"])
    with pytest.raises(DataError, match=re.escape(f"{name}, line 9: {text}") + "$"):
        read(criteo(tmp_path / name, data))
    dataset = criteo(tmp_path / name, data, on_bad_row="skip")
    assert_rows(dataset, rows)
    example = f"{tmp_path / name}, line 9: {text}"
    assert dataset.bad_rows.report() == {reason: {"rows": 2, "example": example}}
    assert dataset.num_rows == 20


def test_h07_blank_lines_at_the_end(tmp_path: Path) -> None:
    rows = criteo_cells(3)
    for end in (b"", b"\n", b"\r\n\n\n"):
        assert_rows(criteo(tmp_path / "a.tsv", criteo_bytes(rows) + end), rows)


def test_h07_nothing_but_bad_lines(tmp_path: Path) -> None:
    dataset = criteo(tmp_path / "a.tsv", b"what is this\n" * 5, on_bad_row="skip")
    assert (len(dataset), dataset.bad_rows.total, list(dataset)) == (0, 5, [])


def test_h09_a_missing_value_in_each_column(tmp_path: Path) -> None:
    rows = criteo_cells(39)
    for column, cells in enumerate(rows, 1):
        cells[column] = ""
    assert_rows(criteo(tmp_path / "a.tsv", criteo_bytes(rows)), rows)
    batch = read(criteo(tmp_path / "a.tsv", criteo_bytes(rows), categories="string"))
    assert batch.features["C26"][38] == ""
    for column, cells in enumerate(rows, 1):
        cells[column] = "NA"
    dataset = criteo(tmp_path / "a.tsv", criteo_bytes(rows), on_bad_row="skip")
    assert (dataset.num_rows, dataset.bad_rows.counts) == (0, {"integer": 13, "category": 26})


def test_h09_missing_keys_are_one_key_that_no_other_is(tmp_path: Path) -> None:
    rows = criteo_cells(3)
    rows[0][20], rows[1][20], rows[2][20] = "", "ffffffff", "0"
    batch = read(criteo(tmp_path / "a.tsv", criteo_bytes(rows)))
    assert batch.features["C7"].tolist() == [MISSING, 2**32 - 1, 0]


@pytest.mark.parametrize("block_rows", [3, 1000])
def test_h12_nulls_and_small_pages(tmp_path: Path, block_rows: int) -> None:
    rng = np.random.default_rng(1)
    lists = [None if rng.random() < 0.2 else [BIG + int(k)] * int(k % 5) for k in range(100)]
    keys = [None if k % 3 == 0 else BIG + k for k in range(100)]
    table = pa.table({"label": [0, 1] * 50, "a": pa.array(keys, pa.int64()), "b": lists})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=10, data_page_size=64)
    features = {"a": FeatureColumn(missing=-7), "b": "b"}
    schema = ColumnSchema(features=features)
    form = ParquetFormat(schema, block_rows=block_rows)
    batch = read(StreamDataset([(source, form) for source in find_sources(path)], 7))
    assert batch.features["a"].tolist() == [-7 if key is None else key for key in keys]
    assert [bag.tolist() for bag in batch.features["b"]] == [bag or [] for bag in lists]


@pytest.mark.parametrize("block_rows", [4, 1000])
@pytest.mark.parametrize("batch", range(6))
def test_h13_resuming_after_nulls(tmp_path: Path, batch: int, block_rows: int) -> None:
    keys = [None if k in (3, 9) else k for k in range(40)]
    table = pa.table({"label": [0] * 40, "id": pa.array(keys, pa.int64())})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=25, data_page_size=64)
    schema = ColumnSchema(features={"id": FeatureColumn(missing=99)})

    def dataset() -> StreamDataset:
        form = ParquetFormat(schema, block_rows=block_rows)
        return StreamDataset([(s, form) for s in find_sources(tmp_path / "a.parquet")], 7)

    whole = [99 if key is None else key for key in keys]
    resumed = dataset()
    resumed.restore({**resumed.state(), "offset": batch})
    assert read(resumed).features["id"].tolist() == whole[7 * batch :]


def test_h14_lengths_of_lists(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    lengths = [2000, *rng.integers(0, 3000, 30).tolist()]
    table = pa.table({"label": [0] * 31, "a": [list(range(length)) for length in lengths]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=8, data_page_size=64)
    batch = read(stream_files(tmp_path / "a.parquet", ColumnSchema(features={"a": "a"}), 5))
    assert batch.features["a"].lengths.tolist() == lengths
    assert all(bag.tolist() == list(range(len(bag))) for bag in batch.features["a"])


def test_h16_processes_without_rows(tmp_path: Path) -> None:
    one = write_ids(tmp_path / "a.parquet", range(2))
    none = write_ids(tmp_path / "b.parquet", [])
    schema = ColumnSchema(features={"id": "id"})
    for paths, count in (([none], 0), ([one, none], 1)):
        processes = [
            stream_files(paths, schema, 6, process_index=index, process_count=3)
            for index in range(3)
        ]
        assert [len(process) for process in processes] == [count] * 3
        batches = [list(process) for process in processes]
        assert [len(b) for b in batches] == [count] * 3
        assert sorted(flat(flat(map(ids_of, batches)))) == list(range(2 * count))
    # The one without a row has a copy of the batch's first, of weight 0.
    assert [part[0].num_samples for part in batches] == [1, 1, 1]
    assert batches[0][0].weights.tolist() == [0]
    assert batches[0][0].features["id"].tolist() == [0]


def test_h17_dictionaries_that_differ(tmp_path: Path) -> None:
    groups = [["x", "y", "x"], ["z", "y", "z"], [f"word {k}" for k in range(200)], ["x", "z"]]
    words = flat(groups)
    path, plain = tmp_path / "a.parquet", tmp_path / "b.parquet"
    kind = pa.dictionary(pa.int32(), pa.string())
    columns = pa.schema([("label", pa.int64()), ("a", kind)])
    # The third group's dictionary outgrows its page: the writer falls back to plain.
    with pq.ParquetWriter(path, columns, dictionary_pagesize_limit=64) as writer:
        for group in groups:
            encoded = pa.array(group).dictionary_encode()
            writer.write_table(pa.table({"label": [0] * len(group), "a": encoded}, columns))
    pq.write_table(pa.table({"label": [0] * len(words), "a": words}), plain, use_dictionary=False)
    schema = ColumnSchema(features={"a": FeatureColumn(type="string")})
    keys = [read(stream_files(name, schema, 7)).features["a"] for name in (path, plain)]
    assert keys[0].tolist() == words
    assert fingerprint64(keys[0]).tolist() == fingerprint64(keys[1]).tolist()


def test_h19_integers_beside_nulls(tmp_path: Path) -> None:
    table = pa.table({"label": [0, 1, 1], "a": pa.array([BIG, None, -1], pa.int64())})
    pq.write_table(table, tmp_path / "a.parquet")
    filled = ColumnSchema(features={"a": FeatureColumn(missing=2**62)})
    batch = read(stream_files(tmp_path / "a.parquet", filled, 2))
    assert batch.features["a"].tolist() == [BIG, 2**62, -1]
    schema = ColumnSchema(features={"a": "a"})
    dataset = stream_files(tmp_path / "a.parquet", schema, 2, on_bad_row="skip")
    assert read(dataset).features["a"].tolist() == [BIG, -1]
    (example,) = dataset.bad_rows.examples.values()
    assert example.endswith("a.parquet, row 1: feature column 'a' must be a key, got null")
    with pytest.raises(DataError, match="row 1: feature column 'a' must be a key, got null"):
        read(stream_files(tmp_path / "a.parquet", schema, 2))
    with pytest.raises(DataError, match="column 'a' is null at row 1"):
        read_files(tmp_path / "a.parquet", schema)


@pytest.mark.parametrize(
    "dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
)
def test_h20_extremes_of_every_width(tmp_path: Path, dtype: str) -> None:
    info = np.iinfo(dtype)
    keys = np.array([info.min, info.max, 0], dtype)
    table = pa.table({"label": [0, 1, 0], "a": keys})
    encoding = {"a": "DELTA_BINARY_PACKED"}
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, use_dictionary=False, column_encoding=encoding)
    got = read(stream_files(path, ColumnSchema(features={"a": "a"}), 2)).features["a"]
    assert got.tolist() == [int(info.min), int(info.max), 0]
    assert got.dtype.kind in "iu"


def test_h21_children_of_row_groups_are_never_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is read or joined at a time is bounded by the block and the window."""
    table = pa.table({"label": [0] * 400, "a": [[k] * 5 for k in range(400)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    sizes: list[int] = []
    original = Ragged.from_arrow.__func__  # type: ignore[attr-defined]

    def measured(cls: Any, column: Any, weights: Any = None) -> Ragged:
        bags: Ragged = original(cls, column, weights)
        sizes.append(len(bags.values))
        return bags

    monkeypatch.setattr(Ragged, "from_arrow", classmethod(measured))
    form = ParquetFormat(ColumnSchema(features={"a": "a"}), block_rows=40)
    dataset = StreamDataset([(s, form) for s in find_sources(tmp_path / "a.parquet")], 20)
    assert [bag[0] for bag in read(dataset).features["a"]] == list(range(400))
    assert max(sizes) == 200
    assert len(sizes) == 4 * 3


def test_nothing_is_left_on_disk(tmp_path: Path) -> None:
    """H08: there is no half-made file to be taken for a whole one."""
    dataset = criteo(tmp_path / "a.tsv.gz", criteo_bytes(criteo_cells(30)))
    next(iter(dataset))
    assert [path.name for path in tmp_path.iterdir()] == ["a.tsv.gz"]
