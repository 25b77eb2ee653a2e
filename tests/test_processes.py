# SPDX-License-Identifier: Apache-2.0
"""Several processes are one: the same bits, the same numbers, the same errors, one end."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse import processes
from jaxsparse.testing import assert_trees_equal
from tests import job, program_cache, scenarios

pytestmark = pytest.mark.slow

NAMES = ("exactness", "layer_errors", "together", "requested_stop", "files")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each of two processes of two devices returned."""
    return job.shared_results(tmp_path_factory, NAMES)


@pytest.fixture(scope="module")
def alone():
    """The same steps on one process of four devices."""
    return scenarios.exactness(js.make_mesh(devices=jax.devices()[:4]), 0, 1)


def test_two_processes_of_two_devices_are_bitwise_one_of_four(told, alone):
    first, second = told["exactness"]
    for part in ("rows", "slots"):
        assert_trees_equal(first[part], alone[part])
        assert_trees_equal(second[part], alone[part])


@pytest.mark.parametrize("step", range(len(scenarios.SHARES)))
def test_each_process_gets_the_activations_and_weight_gradients_of_its_samples(told, alone, step):
    first, second = told["exactness"]
    for part in ("acts", "weight_grads"):
        joined = {
            name: np.concatenate([first[part][step][name], second[part][step][name]])
            for name in alone[part][step]
        }
        assert_trees_equal(joined, alone[part][step])
    joined = np.concatenate([first["lengths"][step], second["lengths"][step]])
    assert joined.tolist() == alone["lengths"][step].tolist()


def test_processes_agree_on_sizes_and_pad_to_the_fullest(told):
    first, second = told["exactness"]
    assert first["shapes"] == second["shapes"]
    per_process = [-(-max(share) // 2) * 2 for share in scenarios.SHARES]
    assert [samples for samples, _, _ in first["shapes"]] == [2 * n for n in per_process]


def test_errors_that_only_several_processes_make(told):
    for index, errors in enumerate(told["layer_errors"]):
        assert (
            "in several processes it gives each its own values and cannot run" in errors["in jit"]
        )
        assert "the batches of the processes must have one form" in errors["form"]
        assert f"process {index} has [(" in errors["form"]
        assert f"the devices of process {index} must lie side by side" in errors["order"]
        assert f"process {index} has no device in the mesh" in errors["absent"]
        assert "rung 1 is below the need" in errors["rung"]
        told = ("RuntimeError: process 1 could not go on", "ValueError: feature 'item': key ")
        assert errors["key"].startswith(told[index])
        assert errors["own mesh"] == (4 if index else None)


def test_what_stops_one_process_is_raised_by_all_and_changes_nothing(told):
    first, second = told["together"]
    assert "ValueError: feature 'id': key 99 at position 1" in second["bad key"]
    assert first["bad key"].startswith("RuntimeError: process 1 could not go on")
    assert "labels is nan in sample 0" in first["bad sample"]
    assert second["bad sample"].startswith("RuntimeError: process 0 could not go on")
    assert second["dataset"] == "ValueError: the file ends in the middle of a row"
    assert "process 1 could not go on" in first["dataset"]
    for told_by in (first, second):
        # Both gave samples 0 to 3 in the one step made: 8 samples, two of each id.
        assert told_by["after errors"] == (1, [-0.25] * 4)
        assert "the batches of the processes must have one form; process" in told_by["form"]
        assert "first parameters differ between processes" in told_by["model"]


def test_a_callback_or_a_request_of_one_process_stops_all_at_one_step(told):
    assert [t["callback stop"] for t in told["together"]] == [3, 3]
    first, second = told["requested_stop"]
    assert first == second
    assert 4 <= first <= 6


def test_a_batch_that_is_skipped_in_one_process_is_empty_there(told):
    for told_by in told["together"]:
        step, rows = told_by["skip here"]
        assert (step, rows) == (1, [-0.25] * 4 + [0, 0])
        step, outcome = told_by["skip all"]
        assert (step, outcome) == (1, {"skipped": True})


def test_only_process_0_writes_metrics(told):
    assert told["files"] == [True, False]


def test_on_one_process_the_same_functions_are_plain():
    mesh = js.make_mesh(devices=jax.devices()[:4])
    assert not processes.is_shared(mesh)
    assert processes.local_devices(mesh) == slice(0, 4)
    value = {"a": np.arange(3)}
    assert processes.gather(mesh, value) == [value]
    assert processes.maximum(mesh, [3, -1]).tolist() == [3, -1]
    assert np.asarray(processes.start_maximum(mesh, [3, -1])).tolist() == [3, -1]


KILLS = [(1, "step"), (0, "join"), *((i, m) for i in (0, 1) for m in scenarios.MOMENTS)]
NUM_KILLS = 2 if int(os.environ.get("JAXSPARSE_KILLS", "3")) < 10 else None
"""`make test-all` kills either process at each of the five moments."""


@pytest.mark.parametrize(("index", "moment"), list(dict.fromkeys(KILLS))[:NUM_KILLS])
def test_killing_a_process_ends_the_job_within_a_minute(index, moment, tmp_path):
    start = time.monotonic()
    environment = {**os.environ, **program_cache.ONLY_READ, "JOB_KILL": f"{index}:{moment}"}
    done = job.run([job.__file__, str(tmp_path), "mortal"], 2, 1, timeout=90, env=environment)
    assert time.monotonic() - start < 60
    assert done.returncode == 128 + signal.SIGKILL
    assert f"jaxsparse launch: process {index} ended with signal SIGKILL" in done.stderr


def test_killing_the_launcher_leaves_no_process_behind(tmp_path):
    command = [sys.executable, "-c", job.LAUNCH, "2", "1", sys.executable, job.__file__]
    with subprocess.Popen(
        [*command, str(tmp_path), "mortal"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **program_cache.ONLY_READ},
    ) as launcher:
        assert launcher.stderr is not None
        for line in launcher.stderr:
            if b"eval" in line:  # progress of a training under way
                break
        children = children_of(launcher.pid)
        assert len(children) == 2
        launcher.kill()
    deadline = time.monotonic() + 10
    while any(map(is_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_alive, children))


def children_of(pid):
    return [
        int(path.parent.name)
        for path in pathlib.Path("/proc").glob("[0-9]*/stat")
        if status(path).split()[1:2] == [str(pid)]
    ]


def is_alive(pid):
    return status(pathlib.Path(f"/proc/{pid}/stat"))[:1] not in ("", "Z")


def status(path):
    """State, parent and so on of a process; nothing where it is gone."""
    try:
        return path.read_text().rpartition(") ")[2]
    except (FileNotFoundError, ProcessLookupError):
        return ""
