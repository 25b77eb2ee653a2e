# SPDX-License-Identifier: Apache-2.0
"""The prefetcher: same items, states of what was delivered, errors, and an end without threads."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxsparse.data import Prefetcher, from_arrays
from tests.data.files import flat


def dataset(num_rows: int = 20) -> Any:
    columns = {"id": np.arange(num_rows), "label": np.zeros(num_rows)}
    return from_arrays(columns, 3, shuffle=True, seed=1)


def first_ids(batch: Any) -> list[int]:
    return batch.features["id"].tolist()  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name == "jaxsparse-prefetch"]


def test_items_of_every_epoch() -> None:
    plain, ahead = dataset(), Prefetcher(dataset(), first_ids, depth=2)
    for _ in range(3):
        assert list(ahead) == [first_ids(batch) for batch in plain]
        assert ahead.state() == plain.state()
    assert (len(ahead), ahead.batch_size) == (7, 3)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("stop", [1, 4, 7, 9])
def test_states_are_those_of_delivered_items(stop: int, chained: bool) -> None:
    def ahead() -> Prefetcher[list[int]]:
        inner: Any = Prefetcher(dataset(), depth=3) if chained else dataset()
        return Prefetcher(inner, first_ids, depth=3)

    whole_of = dataset()
    whole = [first_ids(batch) for _ in range(3) for batch in whole_of]
    old, seen = ahead(), []
    items = iter(old)
    for _ in range(stop):
        item = next(items, None)
        if item is None:
            items = iter(old)
            item = next(items)
        seen.append(item)
    time.sleep(0.02)  # the thread runs ahead as far as it may
    state = json.loads(json.dumps(old.state()))
    old.close()
    assert old.state() == state
    new = ahead()
    new.restore(state)
    rest = [item for _ in range(2) for item in new]
    assert (seen + rest)[: len(seen) + 8] == whole[: len(seen) + 8]


def test_a_loop_left_early_goes_on_where_it_was() -> None:
    source = dataset()
    ahead = Prefetcher(source, first_ids, depth=4)
    seen = []
    for item in ahead:
        seen.append(item)
        if len(seen) == 3:
            break
    assert source.state()["offset"] == 3
    seen += list(ahead)
    assert sorted(flat(seen)) == list(range(20))


def test_no_more_than_depth_are_made_ahead() -> None:
    made: list[Any] = []
    items = iter(Prefetcher(range(100), made.append, depth=3))
    next(items)
    time.sleep(0.05)
    assert len(made) <= 5  # one delivered, three ready, one in the making
    items.close()  # type: ignore[attr-defined]


def test_transforms_run_on_the_thread() -> None:
    names = list(Prefetcher([1, 2], lambda _: threading.current_thread().name))
    assert names == ["jaxsparse-prefetch"] * 2


def test_nothing_is_an_item_too() -> None:
    assert list(Prefetcher([1, 2, 3], lambda n: n if n % 2 else None)) == [1, None, 3]


def test_errors_come_in_their_place() -> None:
    def fail_at_2(batch: int) -> int:
        if batch == 2:
            raise ValueError("bad batch 2")
        return batch

    seen = []
    with pytest.raises(ValueError, match="bad batch 2"):
        for item in Prefetcher([0, 1, 2, 3], fail_at_2):
            seen.append(item)
    assert seen == [0, 1]


def test_errors_of_the_dataset() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise OSError("disk gone")

    items = iter(Prefetcher(batches()))
    assert next(items) == 1
    with pytest.raises(OSError, match="disk gone"):
        next(items)


def test_after_an_error_the_failed_batch_comes_again() -> None:
    fail = [True]

    def transform(batch: Any) -> list[int]:
        ids = first_ids(batch)
        if fail and len(seen) == 2:
            fail.clear()
            raise ValueError("once")
        return ids

    seen: list[list[int]] = []
    ahead = Prefetcher(dataset(), transform, depth=1)
    with pytest.raises(ValueError, match="once"):
        for item in ahead:
            seen.append(item)
            time.sleep(0.02)
    seen += list(ahead)
    assert sorted(flat(seen)) == list(range(20))


def test_a_source_is_closed() -> None:
    closed = []

    def batches() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.append(threading.current_thread().name)

    ahead = Prefetcher(batches())
    next(iter(ahead))
    ahead.close()
    ahead.close()
    assert closed == ["jaxsparse-prefetch"]


def test_datasets_without_a_state() -> None:
    ahead = Prefetcher([1, 2])
    assert list(ahead) == [1, 2]
    with pytest.raises(TypeError, match="list has no state"):
        ahead.state()
    with pytest.raises(ValueError, match="depth must be >= 1, got 0"):
        Prefetcher([1], depth=0)


SCRIPT = """
from jaxsparse.data import Prefetcher
import itertools
for item in Prefetcher(itertools.count()):
    if item == 3:
        raise RuntimeError("training failed")
"""


def test_a_process_that_fails_ends() -> None:
    """With the exit code of its error, though the thread still runs."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("RuntimeError: training failed")
