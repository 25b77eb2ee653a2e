# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the GPU kernels: says that there is no GPU; measures and checks in small."""

from __future__ import annotations

import json

import pytest
from jax.experimental import pallas as pl

from benchmarks import gpu, gpu_checks

TINY = gpu.Sizes(
    num_rows=300,
    num_ids=200,
    num_distinct=70,
    dim=4,
    samples=3,
    vectors=3,
    vector_dim=4,
    copied_bytes=4096,
    rounds=1,
    repeats=2,
)


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels run without a GPU; they run anywhere else by mistake."""
    call = pl.pallas_call
    monkeypatch.setattr(
        pl, "pallas_call", lambda *args, **options: call(*args, **{**options, "interpret": True})
    )


def test_without_a_gpu_it_ends_with_code_2(capsys, tmp_path):
    assert gpu.main(str(tmp_path / "gpu.json")) == 2
    assert "benchmarks.gpu: needs a GPU, jax has cpu only" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.slow
def test_the_result_is_told(monkeypatch, capsys, tmp_path):
    """The kernels replaced by XLA's programs, which compile faster."""
    monkeypatch.setattr(gpu.jax, "default_backend", lambda: "gpu")
    measure, works = gpu.measure, gpu.works
    quick = ("forward", "backward, row-wise Adagrad")
    monkeypatch.setattr(gpu, "works", lambda sizes: {n: works(sizes)[n] for n in quick})
    monkeypatch.setattr(gpu, "measure", lambda sizes: measure(TINY, "xla"))
    monkeypatch.setattr(
        gpu_checks, "check_all", lambda kernels: {"sums one": "", "sums two": "off"}
    )
    out = tmp_path / "gpu.json"
    assert gpu.main(str(out)) == 1
    result = json.loads(out.read_text())
    assert result["copy_bytes_per_s"] > 0 and result["not_timed"] == []
    assert tuple(result["results"]) == quick
    for told in result["results"].values():
        assert told["ms"] > 0 and told["xla_ms"] > 0 and told["least_ms"] > 0
    table = capsys.readouterr().out
    assert "backward, row-wise Adagrad" in table and "0.43" in table
    assert "sums two: off" in table and "2 checks" in table


def test_no_more_is_begun_than_there_is_time_for():
    result = gpu.measure(TINY, "xla", budget_s=0)
    assert result["results"] == {} and "forward" in result["not_timed"]


@pytest.mark.slow
def test_checks_find_nothing_wrong_with_kernels(interpreted):
    names = ("unique few", "dot_interaction two", "bag_gradients scaled")
    found = gpu_checks.check_all("triton", only=lambda name: name in names)
    assert found == dict.fromkeys(names, "")


@pytest.mark.slow
def test_kernels_are_timed(interpreted):
    result = gpu.measure(TINY)
    assert result["implementation"] == "triton" and len(result["results"]) == 10
    assert set(gpu.FBGEMM_MS) < set(result["results"])


@pytest.mark.slow
def test_checks_of_every_kind_pass(interpreted):
    """A few of each; tests/ops have the kernels on every case."""
    names = list(gpu_checks.checks())
    updates = [name for name in names if name.startswith("row_update")]
    others = [name for name in names if name not in updates]
    chosen = {*others[::4], *updates[::40]}
    found = gpu_checks.check_all("triton", only=chosen.__contains__)
    assert len(found) == len(chosen) and not any(found.values()), found


def test_checks_find_what_is_wrong(monkeypatch):
    monkeypatch.setattr(gpu_checks, "bag_gradients_reference", lambda grads, **_: 1.0)
    monkeypatch.setattr(gpu_checks, "unique_reference", lambda rows, _: (rows,) * 3)
    found = gpu_checks.check_all(
        "xla", only=lambda name: name in ("unique few", "bag_gradients no_entries")
    )
    assert found["unique few"] == "groups differ"
    assert found["bag_gradients no_entries"].startswith("60 sums differ, by up to 1.0")
