# SPDX-License-Identifier: Apache-2.0
"""Row stores of several processes are one: the same bits, the same keys, the same errors."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.testing import assert_trees_equal
from tests import job
from tests.oracle import assert_rows
from tests.store import shared_jobs, test_row_store

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """By scenario, what each of two processes of two devices returned."""
    both = job.shared_results(tmp_path_factory, ["row_stores"])["row_stores"]
    return {name: [one[name] for one in both] for name in both[0]}


@pytest.fixture(scope="module")
def mesh():
    """One process of four devices."""
    return js.make_mesh(devices=jax.devices()[:4])


def joined(parts):
    """Activations by batch of all samples, of those of each process."""
    return [
        {name: np.concatenate([one[name] for one in batch]) for name in batch[0]}
        for batch in zip(*parts, strict=True)
    ]


def test_200_steps_are_bitwise_those_of_one_process(told, mesh):
    alone = shared_jobs.tiers(mesh, 0, 1)
    for setup, want in alone.items():
        both = [one[setup] for one in told["tiers"]]
        assert_trees_equal(joined([one["acts"] for one in both]), want["acts"])
        for got in both:
            for part in ("initial", "keys", "rows", "slots"):
                assert_trees_equal(got[part], want[part])
            for what in shared_jobs.COUNTED:
                assert got["stats"][what] == want["stats"][what], what
        # Each has its own rows, and they are all.
        census = [one["census"] for one in both]
        assert np.array_equal(np.sort(np.concatenate([c.keys for c in census])), want["keys"])
        for tier in ("device_rows", "host_rows", "ssd_rows"):
            counts = [one["stats"][tier] for one in both]
            assert sum(counts) == want["stats"][tier] and all(counts) == any(counts), tier
    ssd = [one["ssd"] for one in told["tiers"]]
    assert ssd[0]["folders"] == ["a/process-0/t", "a/process-1/t"]
    assert min(one["stats"]["ssd_read_bytes"] for one in ssd) > 0
    assert max(one["stats"]["host_rows"] for one in ssd) <= test_row_store.NUM_KEYS // 20


@pytest.mark.parametrize("setup", ["device", "ssd"])
def test_200_steps_equal_the_oracle(told, setup):
    oracle = test_row_store.oracle()
    seen = sorted(oracle.travel["t"])
    for got in (one[setup] for one in told["tiers"]):
        assert got["keys"].tolist() == seen
        assert_rows(got["rows"], oracle.read("t", seen), oracle.travelled("t", seen))


def test_keys_come_and_go_as_in_one_process(told, mesh):
    alone = shared_jobs.policies(mesh, 0, 1)
    both = told["policies"]
    for part in ("first", "second", "evaluated"):
        assert_trees_equal(joined([one[part] for one in both]), alone[part])
    for got in both:
        for part in ("evicted", "contents", "unknown"):
            assert_trees_equal(got[part], alone[part])
        assert got["unchanged"], "by an evaluation"
    for name, table in alone["contents"].items():
        counted = table["counted"]
        refuses = "admission" in shared_jobs.POLICIES[name]
        assert bool(counted["admissions_refused"]) == refuses, name
        assert counted["evictions"] > 5 or refuses, name


def test_a_process_without_batches_goes_on_with_empty_ones(told):
    first, second = told["trouble"]
    assert (first["uneven"], second["uneven"]) == ([2, 1, 3, 1], [2, 0, 0, 0])
    for got in (first, second):
        assert got["counts"] == {1: -3, 2: -1, 3: -2, 4: -1, 5: -1, 7: -1, 9: -1}
    assert_trees_equal(first["looked"][0]["f"], np.float32([[-3]]))
    assert first["looked"][1]["f"].size == 0
    assert_trees_equal(second["looked"][0]["f"], np.float32([[-2], [-1]]))
    assert_trees_equal(second["looked"][1]["f"], np.float32([[0]]))


def test_what_stops_one_process_is_raised_by_all_and_changes_nothing(told):
    first, second = told["trouble"]
    elsewhere = "RuntimeError: process {} could not go on, for a reason that it tells itself"
    assert second["dataset"] == "ValueError: the file ends in the middle of a row"
    assert first["dataset"].startswith(elsewhere.format(1))
    assert first["bad batch"].startswith("TypeError: feature 'f': keys must be integers")
    assert second["bad batch"].startswith(elsewhere.format(0))
    for what in ("disk", "read"):
        assert second[what] == "StoreError: the disk is gone"
        assert first[what].startswith(elsewhere.format(1))
    assert "process-1" in second["folder"]
    assert first["folder"].startswith(elsewhere.format(1))
    for got in (first, second):
        assert "table 't' is full: the batch brings 80 new keys, 7 of its 64 rows" in got["full"]
        assert (
            "one batch needs 5 rows on the devices of the process that owns them, number 1 of 2, "
            "the table has 4;" in got["places"]
        )
        assert got["after errors"] == [-3, -2]
        assert got["after disk"] == [-2, -2, 0, 0] * 4


def test_checkpoints_are_refused(told):
    for got in told["trouble"]:
        for what in ("contents", "refill"):
            want = f"ValueError: {what}: the rows of a store that several processes share cannot"
            assert got[what].startswith(want)
    for got in told["fit"]:
        assert "cannot be saved where several processes share the mesh" in got["saved"]


def test_fit_is_bitwise_that_of_one_process(told, mesh):
    alone = shared_jobs.fit(mesh, 0, 1)
    both = told["fit"]
    predictions = np.concatenate([one["predictions"] for one in both])
    halves = alone["predictions"].reshape(2, 2, -1)  # batch, process
    assert_trees_equal(predictions, halves.swapaxes(0, 1).reshape(-1))
    for got in both:
        for part in ("history", "evals", "eval", "keys", "rows", "step"):
            assert_trees_equal(got[part], alone[part])


def test_fit_ends_in_all_processes_at_once(told):
    first, second = told["fit"]
    for got in (first, second):
        assert (got["samples"], got["steps"]) == (3 * 16, 5)
    assert first["stopped"] == second["stopped"] <= 12
    elsewhere = "RuntimeError: process 0 could not go on"
    for what in ("bad step", "bad eval"):
        assert "labels is nan in sample 0" in first[what]
        assert second[what].startswith(elsewhere)
