# SPDX-License-Identifier: Apache-2.0
"""What `make bench` times, and the form of its results."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import pytest

import jaxsparse as js
from benchmarks import __main__ as bench
from benchmarks import ablation, against_peers, growth, growth_limits, op_works, ops, ours, turns
from benchmarks.charts import draw_growth
from benchmarks.report import requirement, save, summary
from benchmarks.workload import state_bytes
from jaxsparse.ops.native import library
from jaxsparse.ops.row_update.cases import UpdateCase
from jaxsparse.ops.segment_sum.cases import GroupCase
from tests.fake_workers import SMALL, FakeWorker, fakes
from tests.test_benchmarks import MACHINE

QUARTILES = set(turns.QUARTILES)

# ---- what is timed ----------------------------------------------------------------------------


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = js.make_mesh(devices=jax.devices()[:1])
    monkeypatch.setattr(js, "make_mesh", lambda: mesh)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "options", [{}, {"donate": False, "users_rule": True}], ids=["all of it", "less of it"]
)
def test_our_tasks_train(options: dict[str, Any]) -> None:
    parts = ("sparse", "dlrm") if not options else ("sparse",)
    for part in parts:
        shape = dataclasses.replace(SMALL, part=part, ids="equal", bag=2, num_batches=1)
        task = ours.prepare(shape, options)
        task.step(0)
        assert task.facts["state_bytes"] >= state_bytes(shape)
        memory = task.memory()
        assert memory["peak_bytes"] >= memory["resident_bytes"] > 0 < memory["base_bytes"]
        with pytest.raises(ValueError, match="XLA's threads are given when the process starts"):
            task.set_threads(2)
        if isinstance(task, ours.SparseTask):
            # Two steps of gradient 32 in every element: Adagrad from .1 on.
            row = task.emb.read(task.state, "t0", [task.batches[0]["f0"][0, 0]])
            accumulated = np.float64([0.1 + 1024, 0.1 + 2048])
            np.testing.assert_allclose(row, -0.01 * (32 / np.sqrt(accumulated)).sum(), rtol=1e-4)


def tiny_works() -> Any:
    yield op_works.sums(
        GroupCase(parts=(8192,), dim=64, num_groups=4000, num_entries=20_000), "small"
    )
    yield next(op_works.updates(UpdateCase(), "small"))


@pytest.mark.slow
@pytest.mark.skipif(not library.is_available(), reason="there is no native library")
def test_operations_are_timed_and_the_kernels_are_faster(tmp_path: pathlib.Path) -> None:
    """The kernel that sums gradients is 8 times as fast here, on a quiet machine."""
    told = []
    for _ in range(3):
        result = ops.measure(rounds=2, chosen=tiny_works)
        sums, update = result["ops"]
        told.append(sums["xla"]["lower"] / sums["native"]["lower"])
        if told[-1] > 1.5:
            break
    assert told[-1] > 1.5, f"times as fast as XLA: {told}"
    assert (sums["op"], update["case"]) == ("bag_gradients", "adagrad, small")
    for one in result["ops"]:
        assert QUARTILES <= set(one["native"]) == set(one["xla"])
        assert one["bytes"] > 0 and one["share"] > 0
    check_form(result, "ops", tmp_path)
    assert len(ops.table(result).splitlines()) >= 4


# ---- results ----------------------------------------------------------------------------------


def check_form(result: dict[str, Any], name: str, folder: pathlib.Path) -> None:
    """What all results have; they survive JSON."""
    assert result["benchmark"] == name and set(result["machine"]) == MACHINE
    save(result, folder / "new" / f"{name}.json")
    assert json.loads((folder / "new" / f"{name}.json").read_text()) == result
    for one in result.get("requirements", []):
        assert set(one) == {"what", "got", "limit", "at_least", "met"}


def test_figures_that_are_required() -> None:
    told = [requirement("speed", 3.0, 3.0), requirement("memory", 1.2, 1.15, at_least=False)]
    assert [one["met"] for one in told] == [True, False]
    met, not_met = summary(told).splitlines()
    assert met.split()[0] == "met" and "(at least 3)" in met
    assert not_met.startswith("NOT MET  memory") and "(at most 1.15)" in not_met


def test_the_result_beside_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(against_peers, "ours", fakes(lambda _: 2.0))
    monkeypatch.setattr(
        against_peers, "peer", fakes(lambda shape: 7.0 if shape.part == "sparse" else 2.2)
    )
    monkeypatch.setattr(against_peers, "copy_bandwidth", lambda: 1e6)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    shapes = {
        name: dataclasses.replace(SMALL, part=shape.part, rule=shape.rule)
        for name, shape in against_peers.WORKLOADS.items()
    }
    result = against_peers.measure(10, shapes)
    check_form(result, "against_peers", tmp_path)
    assert [round(one["ratio"], 2) for one in result["workloads"].values()] == [3.5, 3.5, 1.1, 3.5]
    assert [one["met"] for one in result["requirements"]] == [True, True, False, True]
    first = next(iter(result["workloads"].values()))
    assert first["peer_threads"] == 1 and len(first["peer"]["ms"]) == 10
    assert first["floor_ms"] == first["bytes"] / 1e6 * 1e3
    assert first["share"] == first["floor_ms"] / 2.0
    lines = against_peers.table(result).splitlines()
    assert len(lines) == 1 + 5 + 4 and "3.50" in lines[2]


def test_the_result_of_growth(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    for module in (growth, growth_limits):
        monkeypatch.setattr(module, "ours", fakes(lambda shape: shape.num_ids / 100))
    monkeypatch.setattr(growth, "copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(growth, "peer", fakes(lambda shape: shape.rows / 10))
    points = {
        name: tuple((size, dataclasses.replace(SMALL, **{field: size})) for size in sizes)
        for name, field, sizes in (
            ("rows", "rows", (50, 500)),
            ("tall", "rows", (50, 5000)),
            ("bag", "bag", (1, 4)),
        )
    }
    series = {name: growth.Series(name, "size", at) for name, at in points.items()}
    series["devices"] = growth.Series("d", "devices", ((1, SMALL), (2, SMALL)), devices=True)
    hot = dataclasses.replace(SMALL, batch=1, bag=40, ids="equal")
    result = growth.measure(2, series, hot)
    check_form(result, "growth", tmp_path)
    for one in result["series"].values():
        for point in one["points"]:
            assert set(point["ours"]) == QUARTILES and point["bytes"] > 0
            assert set(point["peer"]) == {*QUARTILES, "threads"}
    got = [one["got"] for one in result["requirements"]]
    # Growth and memory of two series, the bag of equal ids, and time of an id.
    assert got == pytest.approx([1, 1.1, 1, 1.1, 1, 1])
    assert growth.table(result).count("\n") > 20
    draw_growth(result, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes()[1:4] == b"PNG"


def test_every_series_ends_where_the_figures_are_required() -> None:
    sizes = {name: [size for size, _ in one.points] for name, one in growth.SERIES.items()}
    assert (sizes["rows"][0], sizes["rows"][-1]) == (10**5, 10**6)
    assert (sizes["tall"][0], sizes["tall"][-1]) == (10**5, 10**7)
    assert (sizes["batch"][0], sizes["batch"][-1]) == (128, 65_536)
    for name in growth.TALLER:
        ids = [shape.id_rows for _, shape in growth.SERIES[name].points]
        assert set(ids) == {10**5}
    assert growth_limits.HOT.bag == 10**5


def test_the_result_of_the_ablation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    started: list[dict[str, str]] = []

    def start(environment: dict[str, str]) -> Any:
        started.append(environment)
        return fakes(lambda shape: 3.0 if shape.ids == "distinct" else 2.0)()

    monkeypatch.setattr(ablation, "ours", start)
    result = ablation.measure(2, {"sparse": SMALL})
    check_form(result, "ablation", tmp_path)
    switches = [name for environment in started for name in environment]
    assert switches == ["JAXSPARSE_NATIVE", "JAXSPARSE_ALLOCATOR"]
    assert result["variants"]["sparse"]["dedup"]["lower"] == 3.0
    lines = ablation.table(result).splitlines()
    assert len(lines) == 2 + len(ablation.VARIANTS)
    assert "1.50" in next(line for line in lines if line.startswith("no dedup"))


def test_one_command_measures_everything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = {"benchmark": "ops", "requirements": [requirement("speed", 1.0, 2.0)]}
    folders = []

    def on_disk(folder: pathlib.Path | None) -> dict[str, Any]:
        folders.append(folder)
        return {"benchmark": "disks"}

    asked: list[str] = []
    measures = {
        "ops": bench.Measure(
            measure=lambda: fake,
            table=lambda _: "a table",
            draw=lambda result, path: path.write_text("drawn"),  # type: ignore[arg-type]
            has_peer=True,
        ),
        "disks": bench.Measure(measure=on_disk, table=lambda _: "of disks", on_disk=True),
    }
    monkeypatch.setattr(bench, "MEASURES", measures)
    monkeypatch.setattr(bench, "peer", fakes(lambda _: 1.0))
    monkeypatch.setattr(FakeWorker, "ask", lambda self, do: asked.append(do))
    assert bench.main(["--out", str(tmp_path), "--folder", str(tmp_path / "rows")]) == 1
    assert json.loads((tmp_path / "ops.json").read_text()) == fake
    assert (tmp_path / "ops.png").read_text() == "drawn"
    assert not (tmp_path / "disks.png").exists()
    assert folders == [tmp_path / "rows"] and asked == ["check"]
    told = capsys.readouterr().out
    assert "a table" in told and "of disks" in told
    assert "== required figures ==\nNOT MET  speed" in told


def test_what_has_no_peer_does_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("JAXSPARSE_PEER_PYTHON", "/no/such/python")
    index = bench.Measure(measure=lambda: {"benchmark": "index"}, table=lambda _: "")
    monkeypatch.setitem(bench.MEASURES, "index", index)
    assert bench.main(["--out", str(tmp_path), "index"]) == 0
    assert bench.main(["--out", str(tmp_path), "index", "growth"]) == 2


def test_the_command_tells_what_it_measures_and_the_space_it_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert list(bench.MEASURES)[-2:] == ["ssd", "tiers"]
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "ssd takes 2 GB, tiers 12 GB, and 14 GB for its store of 10 GB" in told
