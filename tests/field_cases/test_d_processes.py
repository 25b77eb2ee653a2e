# SPDX-License-Identifier: Apache-2.0
"""Field cases D over processes: collectives, uneven shares, what is gathered, more than 32 ranks.

Decided here: processes agree on the sizes of every batch; one without data goes on with empty
batches; metrics are gathered and are the same in every process; predictions stay where they are.
"""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse import distributed
from tests import job, scenarios

NAMES = ("numbers", "uneven", "buckets", "curves")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each of two processes of four devices returned."""
    return job.shared_results(tmp_path_factory, NAMES, devices=4)


@pytest.mark.slow
def test_d06_collectives_of_mib_chunks_equal_numpy_on_two_processes(told):
    # `numbers` runs check_collectives, which raises where they differ; it did not.
    assert len(told["numbers"]) == 2


def test_d06_the_self_check_passes_here_and_finds_one_wrong_value(monkeypatch):
    mesh = js.make_mesh(devices=jax.devices()[:4])
    distributed.check_collectives(mesh, rounds=2, chunks=(1 << 12,))
    calls = []
    sound = distributed._collectives

    def tail_lost(mesh, numbers):
        calls.append(numbers)
        a2a, psum, gathered = sound(mesh, numbers)
        return a2a, psum.at[-1, -1].add(1.0) if len(calls) == 2 else psum, gathered

    monkeypatch.setattr(distributed, "_collectives", tail_lost)
    wrong = r"psum gives 1 of 4096 wrong values on device 3 of process 0 \(4,096 bytes a chunk, r"
    with pytest.raises(RuntimeError, match=wrong):
        distributed.check_collectives(mesh, rounds=2, chunks=(1 << 12,))


FORTY = """
import jax, numpy as np
import jaxsparse as js
from tests import scenarios
from jaxsparse.testing import assert_trees_equal
assert len(jax.devices()) == 40
# Each step has programs of its own: one of eight samples, one of a single one, one of none.
told = [
    scenarios.exactness(js.make_mesh(devices=jax.devices()[:n]), 0, 1, steps=(0, 3, 5))
    for n in (1, 40)
]
for part in ("acts", "weight_grads", "rows", "slots"):
    assert_trees_equal(told[1][part], told[0][part])
"""


@pytest.mark.slow
def test_d10_forty_devices_give_the_bits_of_one():
    flags = "--xla_force_host_platform_device_count=40"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", FORTY], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_d12_unequal_batch_counts_use_every_batch_once_an_epoch(told):
    wanted = np.zeros(64)
    # Batches of 4 in both processes for three steps, in one process for two more; two epochs.
    wanted[:12], wanted[12:20], wanted[20:32] = -2 / 8, -2 / 4, -2 / 8
    for told_by in told["uneven"]:
        assert (told_by["steps"], told_by["samples"]) == (10, 64)
        assert told_by["rows"].tolist() == wanted.tolist()


@pytest.mark.slow
def test_d12_a_process_that_never_has_a_batch_keeps_step(told):
    first, second = told["uneven"]
    moved = np.zeros(64)
    moved[40:43] = np.float32(-1 / 3) * 2
    for told_by in (first, second):
        np.testing.assert_allclose(told_by["alone"], moved, rtol=1e-6)
        assert told_by["alone eval"]["num_samples"] == 3
        assert "evaluate: the dataset has no samples" in told_by["nothing"]
        assert "a pass over the dataset made no step" in told_by["no step"]
    assert repr(first["alone eval"]) == repr(
        second["alone eval"]
    )  # nan where labels are of one class
    assert (first["alone predict"].shape, second["alone predict"].shape) == ((0,), (3,))


@pytest.mark.slow
def test_d13_the_bucket_is_the_largest_over_processes(told):
    first, second = told["buckets"]
    assert first["buffer"] == second["buffer"] >= 32
    assert first["sums"] == [28.0, 28.0]
    assert second["sums"] == [496.0, 496.0]


@pytest.mark.slow
def test_d14_what_is_gathered_has_one_form_whatever_the_number_of_processes(told):
    alone = scenarios.numbers(js.make_mesh(devices=jax.devices()[:2]), 0, 1)
    first, second = told["numbers"]
    assert [len(t["gathered"]) for t in (alone, first, second)] == [1, 2, 2]
    for told_by in (first, second):
        for index, value in enumerate(told_by["gathered"]):
            assert value["index"] == index
            assert value["pi"] == np.pi * (index + 1)  # float64 although jax has none here
            assert value["big"] == 2**40 + index
            assert value["array"].tolist() == [2**40 + n for n in range(1000 * index)]
        assert told_by["maximum"].tolist() == [1, 0, 7]
        assert told_by["shared"]
    assert alone["gathered"][0]["pi"] == np.pi
    assert [t["told"] for t in (first, second)] == [(True, True), (False, True)]


@pytest.mark.slow
def test_d14_metrics_are_the_same_in_every_process_and_those_of_all_samples(told):
    first, second = told["curves"]
    assert first["eval"] == second["eval"]
    metrics = js.BinaryMetrics(from_logits=False)
    for told_by in (first, second):
        metrics.update(told_by["predictions"], told_by["labels"], told_by["weights"])
    assert first["eval"]["auc"] == metrics.result()["auc"]
    assert first["eval"]["num_samples"] == 150


@pytest.mark.slow
def test_d17_two_processes_of_four_devices_learn_as_one_of_eight(told):
    alone = scenarios.curves(js.make_mesh(devices=jax.devices()), 0, 1)
    first, second = told["curves"]
    assert first["loss"] == second["loss"]
    assert len(alone["loss"]) == 20
    np.testing.assert_allclose(first["loss"], alone["loss"], rtol=0, atol=1e-6)
    assert first["samples"] == alone["samples"] == [32] * 20
    np.testing.assert_allclose(first["auc"], alone["auc"], rtol=0, atol=1e-6)
    assert first["eval"]["auc"] == pytest.approx(alone["eval"]["auc"], abs=1e-6)
    joined = [
        np.concatenate([first["predictions"][a:b], second["predictions"][a:b]])
        for a, b in ((0, 25), (25, 50), (50, 75))
    ]
    np.testing.assert_allclose(np.concatenate(joined), alone["predictions"], atol=1e-6)
