# SPDX-License-Identifier: Apache-2.0
"""Field cases F06, F07, F08: where the data goes on after a stop.

Decided here: a position is (epoch, batch of the whole job), and the order of rows depends on
neither the number of processes nor what was read before. So a stop at any batch, in the middle of
a window of the shuffle too, is taken up exactly, in a fresh object, by any number of processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxsparse.data import Prefetcher, StreamDataset, stream_files
from tests.data.files import IDS, flat, ids_of, write_ids


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """100 records in row groups of 9."""
    return write_ids(tmp_path / "a.parquet", range(100), row_group_size=9)


def stream(path: Path, batch_size: int, **options: Any) -> StreamDataset:
    return stream_files(path, IDS, batch_size, **{"shuffle": True, "seed": 3, **options})


def take(dataset: Any, count: int) -> list[Any]:
    batches = iter(dataset)
    return [next(batches) for _ in range(count)]


def saved(dataset: Any) -> Any:
    return json.loads(json.dumps(dataset.state()))


@pytest.mark.parametrize("prefetch", [False, True])
def test_f06_all_records_once(path: Path, prefetch: bool) -> None:
    def dataset() -> Any:
        rows = stream(path, 8, shuffle_rows=32)
        return Prefetcher(rows, depth=3) if prefetch else rows

    first = dataset()
    seen = ids_of(take(first, 5))
    state = saved(first)
    fresh = dataset()
    fresh.restore(state)
    assert sorted(flat(seen + ids_of(fresh))) == list(range(100))


def test_f07_a_stop_inside_a_window(path: Path) -> None:
    whole = flat(ids_of(stream(path, 5, shuffle_rows=40)))
    first = stream(path, 5, shuffle_rows=40)
    take(first, 3)
    fresh = stream(path, 5, shuffle_rows=40)
    fresh.restore(saved(first))
    assert flat(ids_of(fresh))[:50] == whole[15:65]


@pytest.mark.parametrize("hosts", [2, 1, 4])
@pytest.mark.parametrize("stop", [5, 20, 37, 51, 64])
def test_f08_none_lost_none_repeated(tmp_path: Path, stop: int, hosts: int) -> None:
    """Stopped on two hosts after ``stop`` records each, taken up on ``hosts``."""
    path = write_ids(tmp_path / "a.parquet", range(160), row_group_size=9)
    options: dict[str, Any] = {"shuffle_rows": 16}
    two = [stream(path, 4, process_index=p, process_count=2, **options) for p in range(2)]
    assert len(two[0]) == 40
    # Two records a host and batch: an odd stop is that of the batch it lies in.
    seen = [ids_of(take(dataset, (stop + 1) // 2)) for dataset in two]
    others = [
        stream(path, 4, process_index=p, process_count=hosts, **options) for p in range(hosts)
    ]
    for dataset in others:
        dataset.restore(saved(two[0]))
    rest = [ids_of(dataset) for dataset in others]
    assert sorted(flat(flat(seen + rest))) == list(range(160))
