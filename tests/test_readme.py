# SPDX-License-Identifier: Apache-2.0
"""The README's code runs, in order, in one process."""

from __future__ import annotations

import pathlib
import re

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"


def test_readme_python_runs(capsys) -> None:  # type: ignore[no-untyped-def]
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    auc = float(capsys.readouterr().out.strip().splitlines()[-1])
    assert 0.5 < auc <= 1.0


def test_readme_example_is_within_the_first_forty_lines() -> None:
    head = README.read_text().splitlines()[:40]
    assert any(line.startswith("```python") for line in head)
    assert "make train" in "\n".join(head)
    assert "make test" in "\n".join(head)


def test_readme_has_no_placeholder() -> None:
    assert not re.findall(r"\b[A-Z]+_[A-Z_]+\b", README.read_text().replace("XLA_FLAGS", ""))
