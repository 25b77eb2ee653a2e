# SPDX-License-Identifier: Apache-2.0
"""Rows from files and back, and what is wrong with a file."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import struct
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import jaxsparse as js
from jaxsparse.ckpt import CheckpointError, save_state
from jaxsparse.ckpt import rows as rows_module
from jaxsparse.ckpt.rows import RowFileError, export_rows, import_rows

KINDS = ("npz", "safetensors", "parquet", "tsv", "txt.gz")
V, D = 70_001, 3


@dataclasses.dataclass(frozen=True)
class State:
    embeddings: Any


jax.tree_util.register_dataclass(State, ("embeddings",), ())


@pytest.fixture(scope="module")
def emb() -> js.EmbeddingCollection:
    tables = [
        js.TableSpec("ids", vocabulary_size=V, embedding_dim=D),
        js.TableSpec("half", vocabulary_size=50, embedding_dim=4, dtype="bfloat16"),
        js.TableSpec("hashed", vocabulary_size=64, embedding_dim=2, keys=js.Hashed()),
        js.TableSpec(
            "words", vocabulary_size=64, embedding_dim=2, keys=js.Hashed(exact_keys=["shoe", "hat"])
        ),
    ]
    mesh = js.make_mesh(devices=jax.devices()[:2])
    return js.EmbeddingCollection([js.FeatureSpec(t.name, t) for t in tables], mesh=mesh)


@pytest.fixture(scope="module")
def saved(emb: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Any]:
    state = emb.init(jax.random.key(1))
    path = save_state(tmp_path_factory.mktemp("rows") / "1", emb, State(state))
    read = {
        name: emb.read(state, name, np.arange(emb.tables[name].vocabulary_size))
        for name in ("ids", "half")
    }
    return path, read


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "BLOCK_ROWS", 30_000)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_go_out_and_come_back(
    tmp_path: pathlib.Path, emb: Any, saved: tuple[pathlib.Path, Any], kind: str
) -> None:
    path, want = saved
    for table in ("half",) if kind == "txt.gz" else ("ids", "half"):
        file = tmp_path / f"{table}.{kind}"
        count = emb.tables[table].vocabulary_size
        assert export_rows(path, table, file) == count
        state, written = import_rows(emb, emb.init(jax.random.key(2)), table, file)
        assert written == count
        got = emb.read(state, table, np.arange(count))
        assert got.dtype == want[table].dtype and got.tobytes() == want[table].tobytes()


@pytest.mark.parametrize("kind", ["npz", "safetensors", "parquet"])
def test_hashed_rows_come_back_by_row(
    tmp_path: pathlib.Path, emb: Any, saved: tuple[pathlib.Path, Any], kind: str
) -> None:
    path, _ = saved
    file = tmp_path / f"hashed.{kind}"
    assert export_rows(path, "hashed", file) == 64
    state, _ = import_rows(emb, emb.init(jax.random.key(2)), "hashed", file)
    keys = np.array([5, 2**63, 77], np.uint64)
    want = emb.read(emb.init(jax.random.key(1)), "hashed", keys)
    np.testing.assert_array_equal(emb.read(state, "hashed", keys), want)
    with pytest.raises(RowFileError, match=r"a\.tsv: a hashed table does not know its keys, and "):
        export_rows(path, "hashed", tmp_path / "a.tsv")


def test_keys_of_hashed_tables_may_be_given(tmp_path: pathlib.Path, emb: Any) -> None:
    state = emb.init(jax.random.key(1))
    (tmp_path / "a.txt").write_text("hat\t1 2\nboot\t-3.5 4e-1\n", "utf-8")
    state, count = import_rows(emb, state, "words", tmp_path / "a.txt")
    assert count == 2
    got = emb.read(state, "words", ["boot", "hat"])
    np.testing.assert_array_equal(got, np.float32([[-3.5, 0.4], [1, 2]]))
    table = pa.table({"key": ["shoe"], "vector": [[7.0, 8.0]]})
    parquet.write_table(table, tmp_path / "b.parquet")
    state, _ = import_rows(emb, state, "words", tmp_path / "b.parquet")
    assert emb.read(state, "words", ["shoe"]).tolist() == [[7, 8]]
    (tmp_path / "c.txt").write_text(f"{2**64 - 1}\t5 6\n")
    state, _ = import_rows(emb, state, "hashed", tmp_path / "c.txt")
    assert emb.read(state, "hashed", np.array([2**64 - 1], np.uint64)).tolist() == [[5, 6]]


def test_a_matrix_without_keys_is_the_table(tmp_path: pathlib.Path, emb: Any) -> None:
    matrix = np.arange(V * D, dtype=np.float32).reshape(V, D)
    np.savez_compressed(tmp_path / "a.npz", vectors=matrix.astype(np.float64))
    state, count = import_rows(emb, emb.init(jax.random.key(1)), "ids", tmp_path / "a.npz")
    assert count == V
    np.testing.assert_array_equal(emb.read(state, "ids", [0, 69_999]), matrix[[0, 69_999]])
    values = np.array([[1, 2, 3, 4]], ml_dtypes.bfloat16)
    header = {"vectors": {"dtype": "BF16", "shape": [1, 4], "data_offsets": [0, 8]}}
    text = json.dumps({**header, "__metadata__": {"format": "pt"}}).encode()
    content = struct.pack("<Q", len(text)) + text + values.tobytes()
    (tmp_path / "b.safetensors").write_bytes(content)
    state, _ = import_rows(emb, state, "half", tmp_path / "b.safetensors")
    assert emb.read(state, "half", [0]).astype(np.float32).tolist() == [[1, 2, 3, 4]]


def write(folder: pathlib.Path, name: str, content: Any) -> pathlib.Path:
    path = folder / name
    if name.endswith(".npz"):
        np.savez(path, **content)
    elif name.endswith(".parquet"):
        parquet.write_table(pa.table(content), path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content, "utf-8")
    return path


GOOD = np.ones((2, D), np.float32)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", r"a\.csv: unknown kind of file; known are \.npz, \.safetensors, \.parquet,"),
        ("a.npz.gz", b"", r"a\.npz\.gz: unknown kind of file"),
        ("a.txt", "1 2 3\n", r"a\.txt, line 1: expected key<TAB>numbers, got '1 2 3'"),
        ("a.txt", "1\t1 2 x\n", r"a\.txt, line 1: not numbers: '1 2 x'"),
        ("a.txt", "1\t1 2 3\nhat\t1 2 3\n", r"line 2: key 'hat' is no integer; if keys are strin"),
        ("a.txt", "1\t1 2 3\n2\t1 2\n", r"a\.txt, line 2: 2 numbers, the line before has 3"),
        ("a.txt", "1\t1 2\n", r"a\.txt, row 0: vectors must be \[n, 3\], got \[1, 2\]"),
        ("a.txt", "1\t1 2 3\n4\t1 nan 2\n", r"a\.txt, row 0 \+ 1: the vector is not finite"),
        (
            "a.txt",
            "1\t1 2 3\n70001\t1 2 3\n",
            r"and after: key 70001 at position 1 is outside",
        ),
        ("a.txt", "5\t1 2 3\n5\t1 2 3\n", r"row 0 \+ 1: key 5 leads to row 5, which was given bef"),
        ("a.txt.gz", b"no gzip", r"a\.txt\.gz: cannot be read: Not a gzipped file"),
        ("a.npz", {"keys": [1, 2]}, r"a\.npz: no array 'vectors'; it has \['keys'\]"),
        ("a.npz", {"keys": [1], "vectors": GOOD}, r"a\.npz: keys must be \[2\], got \[1\]"),
        ("a.npz", {"vectors": GOOD[0]}, r"a\.npz: vectors must be \[n, D\], got \[3\]"),
        ("a.npz", {"keys": [1, 70_001], "vectors": GOOD}, "key 70001 at position 1 is outside 0"),
        ("a.npz", {"rows": [1, -1], "vectors": GOOD}, r"row 0 \+ 1: -1 has no row in 0\.\.70000"),
        ("a.npz", {"keys": [1.5, 2], "vectors": GOOD}, r"a\.npz, row 0 and after: .*float"),
        ("a.npz", {"vectors": np.asfortranarray(GOOD)}, r"a\.npz: arrays must be plain and row by"),
        ("a.parquet", {"key": [1]}, r"a\.parquet: no column 'vector'; it has \['key'\]"),
        (
            "a.parquet",
            {"key": [1, 2], "vector": [[1.0, 2.0, 3.0], [1.0]]},
            r"a\.parquet: vectors must all have one length, found \[1, 3\]",
        ),
        ("a.parquet", {"key": [1], "vector": [[1.0, None, 2.0]]}, "a vector holds a null"),
        ("a.safetensors", b"\xff\0\0\0\0\0\0\0{}", r"a\.safetensors: ends too early; is it compl"),
        ("a.safetensors", b"\x02\0\0\0\0\0\0\0{x", r"a\.safetensors: cannot be read: Expecting"),
    ],
)
def test_what_is_wrong_is_told(
    tmp_path: pathlib.Path, emb: Any, name: str, content: Any, message: str
) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(RowFileError, match=message):
        import_rows(emb, emb.init(jax.random.key(1)), "ids", path)


def test_other_mistakes(tmp_path: pathlib.Path, emb: Any, saved: tuple[pathlib.Path, Any]) -> None:
    state = emb.init(jax.random.key(1))
    with pytest.raises(RowFileError, match=r"no table 'x'; tables: \['ids', 'half', "):
        import_rows(emb, state, "x", tmp_path / "a.npz")
    with pytest.raises(RowFileError, match=r"none\.npz: cannot be read: .*No such file"):
        import_rows(emb, state, "ids", tmp_path / "none.npz")
    with pytest.raises(CheckpointError, match=r"1: no table 'x'; tables: \['ids', 'half'"):
        export_rows(saved[0], "x", tmp_path / "a.npz")
    export_rows(saved[0], "ids", tmp_path / "cut.safetensors")
    whole = (tmp_path / "cut.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-4])
    with pytest.raises(RowFileError, match=r"cut\.safetensors: ends too early; is it complete\?"):
        import_rows(emb, state, "ids", tmp_path / "cut.safetensors")
