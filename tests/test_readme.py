# SPDX-License-Identifier: Apache-2.0
"""The README's code runs, in order, in one process."""

from __future__ import annotations

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


def test_readme_python_runs(capsys) -> None:  # type: ignore[no-untyped-def]
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    auc, rows = capsys.readouterr().out.strip().splitlines()[-2:]
    assert 0.5 < float(auc) <= 1.0
    size, *by_tier = map(int, rows.split())
    assert size == 160 == sum(by_tier) and all(by_tier)


def test_readme_example_is_within_the_first_forty_lines() -> None:
    head = README.read_text().splitlines()[:40]
    assert any(line.startswith("```python") for line in head)
    assert "make train" in "\n".join(head)
    assert "make test" in "\n".join(head)


def test_readme_has_no_placeholder() -> None:
    assert not re.findall(r"\b[A-Z]+_[A-Z_]+\b", README.read_text().replace("XLA_FLAGS", ""))


def test_quoted_figures_are_those_of_the_kept_runs() -> None:
    rows = re.findall(
        r"^\| .*?Adagrad \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", README.read_text(), re.M
    )
    order = ("DLRM step, exact Adagrad", "sparse, exact Adagrad", "sparse, row-wise Adagrad")
    kept = ("against_peers", "against_peers_earlier")
    assert len(rows) == len(order) * len(kept)
    for number, name in enumerate(kept):
        result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        machine, told = result["machine"], result["workloads"]
        assert machine["cpu"].startswith("AMD EPYC") and machine["cores"] == 2
        for row, workload in zip(rows[number * len(order) :], order, strict=False):
            ours, peer = told[workload]["ours"]["lower"], told[workload]["peer"]["lower"]
            assert row == (f"{ours:.1f}", f"{peer:.1f}", f"{told[workload]['ratio']:.2f}")
