# SPDX-License-Identifier: Apache-2.0
"""What `make bench` stands on: its ids, its workers and the turns they take."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest

from benchmarks import __main__ as bench
from benchmarks import peer_torchrec, turns, workers, workload
from benchmarks.bandwidth import copy_bandwidth
from benchmarks.workload import Workload, bytes_moved, distinct_rows, state_bytes
from tests.fake_workers import PROCESS, SMALL

# ---- ids --------------------------------------------------------------------------------------


def test_ids_are_as_they_are_called() -> None:
    shape = dataclasses.replace(SMALL, bag=3)
    for ids in ("zipf", "uniform", "distinct", "equal"):
        batches = dataclasses.replace(shape, ids=ids).draw()
        assert [batch.shape for batch in batches] == [(2, 16, 3)] * 2
        assert all(batch.dtype == np.int64 and batch.min() >= 0 for batch in batches)
        assert all(batch.max() < 50 for batch in batches)
        again = dataclasses.replace(shape, ids=ids).draw()
        np.testing.assert_array_equal(batches[1], again[1])
        counts = [np.unique(table).size for batch in batches for table in batch]
        assert ids != "distinct" or counts == [48] * 4
        assert ids != "equal" or counts == [1] * 4


def test_a_taller_table_can_have_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    tall = dataclasses.replace(SMALL, rows=10**9, id_rows=SMALL.rows)
    np.testing.assert_array_equal(tall.draw(), SMALL.draw())
    monkeypatch.setattr(workload, "MOST_IDS", 2 * SMALL.num_ids - 1)
    assert (len(tall.draw()), len(dataclasses.replace(SMALL, batch=8).draw())) == (1, 2)


def test_the_bytes_of_a_step() -> None:
    batches = [np.array([[[1], [1], [2]], [[3], [4], [5]]]), np.zeros((2, 3, 1), np.int64)]
    assert distinct_rows(batches) == 4  # 5 and 2 of them, halves to even
    shape = Workload(tables=2, batch=3, dim=4, rows=10)
    activations, row = 2 * 6 * 16, 16
    assert bytes_moved(shape, distinct=3) == activations + 3 * 4 * row
    rowwise = dataclasses.replace(shape, rule="rowwise_adagrad")
    assert bytes_moved(rowwise, distinct=3) == activations + 3 * (2 * row + 2 * 4)
    assert state_bytes(shape) == 2 * 10 * 8 * 4
    assert state_bytes(rowwise) == 2 * 10 * 5 * 4


def test_copies_have_a_speed() -> None:
    assert copy_bandwidth(1 << 20, repeats=2) > 1e8


# ---- workers ----------------------------------------------------------------------------------


def test_a_worker_answers_line_by_line() -> None:
    with workers._closing([sys.executable, "-c", PROCESS], {}) as worker:
        with pytest.raises(workers.WorkerError, match="'run' needs something prepared"):
            worker.run(3)
        assert worker.prepare(SMALL, donate=False) == {"rows": 50, "options": {"donate": False}}
        times = worker.run(4, threads=2)
        assert len(times) == 4 and min(times) >= 2
        assert worker.ask("memory") == {"steps": 5, "threads": 2}  # one of them to warm up
        assert len(worker.run(1000, seconds=1e-9)) == workers.LEAST_STEPS
        with pytest.raises(workers.WorkerError, match="ValueError: 13 is no dim"):
            worker.prepare(dataclasses.replace(SMALL, dim=13))
        with pytest.raises(workers.WorkerError, match="'memory' needs something prepared"):
            worker.ask("memory")
        with pytest.raises(workers.WorkerError, match="RuntimeError: nothing is installed"):
            worker.ask("check")
        worker.prepare(SMALL)
        with pytest.raises(workers.WorkerError, match=r"requests are prepare, run, .* got 'sing'"):
            worker.ask("sing")
        assert worker.ask("release") == {}


def test_a_worker_that_ends_is_told_of() -> None:
    with (
        workers._closing([sys.executable, "-c", "raise SystemExit(7)"], {}) as worker,
        pytest.raises(workers.WorkerError, match="the worker ended with 7; its output says why"),
    ):
        worker.run(3)
        worker.run(3)


def test_a_peer_that_is_not_installed_says_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RuntimeError, match=r"not installed here .*torch.*`make bench` installs"):
        peer_torchrec.prepare(SMALL, {})
    with pytest.raises(ValueError, match=r"the peer has no options, got {'donate': True}"):
        peer_torchrec.prepare(SMALL, {"donate": True})
    monkeypatch.setenv("JAXSPARSE_PEER_PYTHON", "/no/such/python")
    assert bench.main([]) == 2
    assert "peer_torchrec: /no/such/python does not run" in capsys.readouterr().err


# ---- turns ------------------------------------------------------------------------------------


def test_turns_alternate() -> None:
    order: list[str] = []

    def turn(name: str, ms: float) -> turns.Turn:
        def take() -> list[float]:
            order.append(name)
            return [ms, ms, 9 * ms]

        return take

    taken = turns.take_turns({"a": turn("a", 1.0), "b": turn("b", 2.0)}, rounds=3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert taken == {"a": [1.0] * 3, "b": [2.0] * 3}


@pytest.mark.parametrize(
    ("calm_from", "attempts", "steady"), [(0, 1, True), (4, 2, True), (99, 3, False)]
)
def test_turns_are_taken_again_while_times_spread(
    calm_from: int, attempts: int, steady: bool
) -> None:
    taken = 0

    def take() -> list[float]:
        nonlocal taken
        taken += 1
        return [1.0 if taken > calm_from else float(taken % 4 + 1)]

    told = turns.steady_turns({"only": take}, rounds=4)["only"]
    assert (told["attempts"], told["steady"], taken) == (attempts, steady, 4 * attempts)
    assert set(told) == {*turns.QUARTILES, "ms", "attempts", "steady"}
