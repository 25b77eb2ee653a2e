# SPDX-License-Identifier: Apache-2.0
"""Streamed files: every row once an epoch, in one order for any number of processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxsparse.data import (
    StreamDataset,
    row_reader,
    stream_files,
)
from jaxsparse.data.order import block_order, window_order
from jaxsparse.data.parquet_blocks import ParquetFormat, ParquetReader
from jaxsparse.data.row_reader import RowReader
from jaxsparse.data.sources import find_sources
from tests.data.files import (
    IDS,
    criteo_bytes,
    criteo_cells,
    flat,
    ids_of,
    write_bytes,
    write_ids,
)
from tests.peak_memory import assert_peaks_are_equal


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """111 rows in three kinds of files."""
    return [
        write_ids(tmp_path / "a.parquet", range(50), row_group_size=7),
        write_ids(tmp_path / "b.csv", range(50, 81)),
        write_ids(tmp_path / "c.parquet", range(81, 111), row_group_size=30),
    ]


def shuffled(files: list[Path], batch_size: int = 12, **options: Any) -> StreamDataset:
    options = {"shuffle": True, "seed": 5, "shuffle_rows": 36, **options}
    return stream_files(files, IDS, batch_size, **options)


def test_every_row_once_an_epoch(files: list[Path]) -> None:
    dataset = shuffled(files)
    epochs = [ids_of(dataset) for _ in range(3)]
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [12] * 9 + [3]
        assert sorted(flat(epoch)) == list(range(111))
    assert epochs[0] != epochs[1] != epochs[2]
    assert ids_of(shuffled(files)) == epochs[0]
    assert ids_of(shuffled(files, seed=6)) != epochs[0]
    assert (len(dataset), dataset.num_rows, dataset.batch_size) == (10, 111, 12)


def test_without_shuffle_rows_come_in_order(files: list[Path]) -> None:
    assert flat(ids_of(stream_files(files, IDS, 12))) == list(range(111))
    batches = ids_of(stream_files(files, IDS, 12, drop_last=True))
    assert flat(batches) == list(range(108))
    assert len(ids_of(shuffled(files, drop_last=True))) == 9


def test_rows_are_mixed_over_files(files: list[Path]) -> None:
    first = ids_of(shuffled(files, shuffle_rows=120))[0]
    assert len({number // 37 for number in first}) == 3


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_processes_share_the_same_batches(files: list[Path], count: int, shuffle: bool) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "shuffle_rows": 36, "seed": 2}
    alone = ids_of(stream_files(files, IDS, 12, **options))
    processes = [
        list(stream_files(files, IDS, 12, process_index=p, process_count=count, **options))
        for p in range(count)
    ]
    assert {len(batches) for batches in processes} == {len(alone)}
    for number, whole in enumerate(alone):
        parts = [batches[number] for batches in processes]
        # Equally many in each, and without the padding the batch of one process.
        assert {part.num_samples for part in parts} == {-(-len(whole) // count)}
        assert flat(ids_of(parts)) == whole
        for part in parts:
            if part.weights is not None:
                padding = part.features["id"][part.weights == 0]
                assert set(padding.tolist()) <= {whole[0]}


def test_processes_decode_their_share_only(files: list[Path], monkeypatch: Any) -> None:
    """Of lanes that are as many as the processes, each reads but its own blocks."""
    read: list[int] = []
    original = row_reader.RowReader._block

    def counting(self: Any, number: int) -> Any:
        if self._last[0] != number:
            read.append(number)
        return original(self, number)

    monkeypatch.setattr(row_reader.RowReader, "_block", counting)
    one_row_blocks = [write_ids(files[0], range(96), row_group_size=1)]
    options = {"process_count": 4, "num_lanes": 4, "shuffle_rows": 48}
    list(shuffled(one_row_blocks, process_index=2, **options))
    assert len(read) == len(set(read)) == 96 // 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "batch_size must be an int >= 1, got 0"),
        ({"shuffle_rows": 0}, "shuffle_rows must be an int >= 1"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"process_index": 2, "process_count": 2}, "process_index must be in 0..1, got 2"),
        ({"process_count": 5}, "batch_size must be a multiple of the 5 processes, got 12"),
        ({"on_bad_row": "drop"}, "on_bad_row must be one of .*, got 'drop'"),
    ],
)
def test_arguments(files: list[Path], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        shuffled(files, **options)


# --- resuming --------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0, 1, 5, 9, 10, 13])
def test_resuming_in_a_fresh_object(files: list[Path], stop: int) -> None:
    dataset = shuffled(files)
    whole = [ids for _ in range(2) for ids in ids_of(dataset)]
    first, seen = shuffled(files), []
    batches = iter(first)
    for _ in range(stop):
        batch = next(batches, None)
        if batch is None:
            batches = iter(first)
            batch = next(batches)
        seen += ids_of([batch])
    fresh = shuffled(files)
    fresh.restore(json.loads(json.dumps(first.state())))
    rest = [ids for _ in range(2) for ids in ids_of(fresh)]
    assert (seen + rest)[: len(whole)] == whole


SCRIPT = """
import json, sys
from pathlib import Path
from tests.data.files import ids_of
from tests.data.test_stream import shuffled
dataset = shuffled([Path(path) for path in sys.argv[2:]])
dataset.restore(json.loads(sys.argv[1]))
print(json.dumps(ids_of(dataset)))
"""


def test_resuming_in_a_new_process(files: list[Path]) -> None:
    dataset = shuffled(files)
    whole = ids_of(dataset)
    dataset = shuffled(files)
    batches = iter(dataset)
    for _ in range(4):
        next(batches)
    command = [sys.executable, "-c", SCRIPT, json.dumps(dataset.state()), *map(str, files)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
    assert json.loads(done.stdout) == whole[4:]


@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 2), (2, 1)])
def test_resuming_with_another_number_of_processes(
    files: list[Path], before: int, after: int
) -> None:
    """The same batches of the whole job, at any batch: no row is seen twice or lost."""
    whole = ids_of(shuffled(files))

    def processes(count: int) -> list[StreamDataset]:
        return [shuffled(files, process_index=p, process_count=count) for p in range(count)]

    old, new = processes(before), processes(after)
    iterators = [iter(dataset) for dataset in old]
    for number in range(5):
        assert flat(ids_of([next(i) for i in iterators])) == whole[number]
    assert len({json.dumps(dataset.state()) for dataset in old}) == 1
    for dataset in new:
        dataset.restore(old[-1].state())
    parts = [ids_of(dataset) for dataset in new]
    rest = [flat(batch) for batch in zip(*parts, strict=True)]
    assert rest == whole[5:]


def test_states_of_other_datasets_are_refused(files: list[Path]) -> None:
    state = shuffled(files).state()
    for change, text in {
        "batch_size": "batch_size=12, but this dataset has batch_size=6",
        "seed": "seed=5, but this dataset has seed=6",
        "shuffle_rows": "shuffle_rows=36, but this dataset has shuffle_rows=60",
        "num_lanes": "num_lanes=8, but this dataset has num_lanes=6",
    }.items():
        other = shuffled(files, **{change: 60 if change == "shuffle_rows" else 6})
        with pytest.raises(ValueError, match=text):
            other.restore(state)
    with pytest.raises(ValueError, match="files="):
        shuffled(files[::-1]).restore(state)
    with pytest.raises(ValueError, match="lacks"):
        shuffled(files).restore({"epoch": 0})
    with pytest.raises(ValueError, match=r"offset in 0\.\.9, got 0 and 10"):
        shuffled(files).restore({**state, "offset": 10})


# --- the order -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 11, 12, 35, 36])
@pytest.mark.parametrize("num_lanes", [1, 4, 8, 50])
def test_a_window_is_a_permutation(num_rows: int, num_lanes: int) -> None:
    order = window_order(num_rows, 12, num_lanes, seed=1, epoch=2, window=3)
    assert sorted(order.tolist()) == list(range(num_rows))


def test_lanes_are_contiguous(num_rows: int = 48) -> None:
    order = window_order(num_rows, 12, 4, 0, 0, 0).reshape(4, 4, 3)
    for lane in range(4):
        assert sorted(order[:, lane].ravel()) == list(range(12 * lane, 12 * lane + 12))


def test_runs_stay_together() -> None:
    order = block_order([3, 1, 0, 4, 1], seed=7, epoch=0).tolist()
    assert sorted(order) == list(range(9))
    for run in ([0, 1, 2], [4, 5, 6, 7]):
        assert order[order.index(run[0]) :][: len(run)] == run


def test_an_order_does_not_change_between_versions() -> None:
    """Saved positions would mean other rows."""
    assert block_order([1] * 8, seed=1, epoch=2).tolist() == BLOCKS
    assert window_order(16, 4, 2, 1, 2, 3).tolist() == WINDOW


BLOCKS = [6, 0, 7, 5, 1, 4, 3, 2]
WINDOW = [0, 6, 8, 15, 2, 5, 10, 14, 4, 7, 13, 9, 3, 1, 12, 11]


def test_large_row_groups_are_read_in_parts(tmp_path: Path) -> None:
    path = write_ids(tmp_path / "a.parquet", range(1000), row_group_size=700)
    form = ParquetFormat(IDS, block_rows=64)
    dataset = StreamDataset([(source, form) for source in find_sources(path)], 50)
    assert flat(ids_of(dataset)) == list(range(1000))
    again = StreamDataset(
        [(source, form) for source in find_sources(path)], 50, shuffle=True, shuffle_rows=100
    )
    assert np.array_equal(np.sort(flat(ids_of(again))), np.arange(1000))


def test_rows_of_one_window_are_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for first, path in zip((0, 70), paths, strict=True):
        write_ids(path, range(first, first + 70), row_group_size=20)
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "num_lanes": 4}

    def part(index: int, **more: Any) -> StreamDataset:
        return stream_files(paths, IDS, 16, **options, process_index=index, process_count=2, **more)

    decoded: list[Any] = []
    read = ParquetReader.read
    monkeypatch.setattr(
        ParquetReader, "read", lambda self, block: decoded.append(block) or read(self, block)
    )
    held = [part(index) for index in (0, 1)]
    got = [[ids_of(dataset) for _ in range(3)] for dataset in held]
    assert len(decoded) == 2 * 8, "every block by each process, in the first epoch alone"
    monkeypatch.setattr(
        StreamDataset,
        "_rows",
        lambda self, order: RowReader(self._files, [self._blocks[n] for n in order]),
    )
    want = [[ids_of(dataset) for _ in range(3)] for dataset in (part(0), part(1))]
    assert got == want
    assert held[0].state() == {**part(0).state(), "epoch": 3}


# --- memory ----------------------------------------------------------------------------------


MEMORY_SCRIPT = """
import sys
from jaxsparse.data import Prefetcher, stream_criteo, stream_files
from tests.data.files import IDS
kind, path, num_rows = sys.argv[1:]
options = {"shuffle": True, "shuffle_rows": 8192}
if kind == "parquet":
    dataset = stream_files(path, IDS, 1024, **options)
else:
    dataset = stream_criteo(path, 1024, **options)
assert sum(batch.num_samples for batch in Prefetcher(dataset)) == int(num_rows)
print("ok")
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("kind", ["tsv", "tsv.gz", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
    arguments = []
    for times in (1, 10):
        path = tmp_path / f"{times}.{kind}"
        num_rows = (400_000 if kind == "parquet" else 50_000) * times
        if kind == "parquet":
            write_ids(path, range(num_rows), row_group_size=20_000)
        else:
            write_bytes(path, criteo_bytes(criteo_cells(5000)) * (num_rows // 5000))
        arguments.append((kind, str(path), str(num_rows)))
    assert_peaks_are_equal(MEMORY_SCRIPT, *arguments)
