# SPDX-License-Identifier: Apache-2.0
"""Rules about the repository itself: licence lines, pinned versions, the environment script."""

from __future__ import annotations

import os
import pathlib
import re
import stat
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parents[1]
SPDX = "# SPDX-License-Identifier: Apache-2.0"
SOURCE_FOLDERS = ("jaxsparse", "tests", "scripts", "benchmarks", "examples", ".ci")


def source_files() -> list[pathlib.Path]:
    """Files that must name their licence."""
    found = [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci" / "run"]
    for folder in SOURCE_FOLDERS:
        for pattern in ("*.py", "*.sh", "*.cc", "*.toml"):
            found += (ROOT / folder).rglob(pattern)
    return found


def test_every_source_file_names_its_licence_at_the_top() -> None:
    missing = []
    for path in source_files():
        head = path.read_text().splitlines()[:2]
        if not any(line.lstrip("/#* ").startswith(SPDX.lstrip("# ")) for line in head):
            missing.append(str(path.relative_to(ROOT)))
    assert not missing


def pins(python_version: str) -> dict[str, str]:
    """Pinned version of each package for one Python version."""
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(requirement.specifier)), line
        if requirement.marker is None or requirement.marker.evaluate(
            {"python_version": python_version}
        ):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} is pinned twice for Python {python_version}"
            found[name] = str(requirement.specifier).removeprefix("==")
    return found


@pytest.mark.parametrize("python_version", ["3.11", "3.12", "3.13"])
def test_direct_dependencies_are_pinned_for_every_python(python_version: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    direct = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {canonicalize_name(Requirement(text).name) for text in direct}
    assert names <= set(pins(python_version))


def test_python_3_11_keeps_the_last_jax_it_can_have() -> None:
    assert pins("3.11")["jax"] == pins("3.11")["jaxlib"] == "0.10.2"
    assert pins("3.12")["jax"] == pins("3.13")["jax"] >= "0.12"


def fake_python(folder: pathlib.Path, version: str) -> pathlib.Path:
    """An interpreter that says it is of another version, as (major, minor, micro)."""
    path = folder / "python3"
    path.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        f"sys.version_info = {version}\n"
        "code = sys.argv[2]\n"
        "sys.argv = sys.argv[2:]\n"
        "exec(code)\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def make_venv(folder: pathlib.Path, python: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "scripts/venv.sh", "dev", folder, python],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_an_old_python_is_refused_before_anything_is_made(tmp_path: pathlib.Path) -> None:
    done = make_venv(tmp_path / "venv", fake_python(tmp_path, "(3, 9, 18)"))
    assert done.returncode == 1
    assert "jaxsparse needs Python >= 3.11, but " in done.stderr
    assert "is 3.9.18" in done.stderr
    assert "make PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_missing_python_is_named(tmp_path: pathlib.Path) -> None:
    done = make_venv(tmp_path / "venv", "python-that-is-not-there")
    assert done.returncode == 1
    assert "'python-that-is-not-there' is not on the PATH" in done.stderr


@pytest.mark.slow
def test_the_environment_is_made_anew_only_when_something_changed(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "venv"
    folder.mkdir()
    left_over = folder / "left-over"
    left_over.touch()
    (folder / ".stamp").write_text("another interpreter")

    made = make_venv(folder, sys.executable)
    assert made.returncode == 0, made.stderr
    assert "Setting up" in made.stderr
    assert not left_over.exists()
    assert (folder / "bin" / "jaxsparse").exists()

    left_over.touch()
    again = make_venv(folder, sys.executable)
    assert (again.returncode, again.stderr) == (0, "")
    assert left_over.exists()


def test_ci_script_is_strict_and_executable() -> None:
    script = ROOT / ".ci" / "run"
    assert "set -euo pipefail" in script.read_text()
    assert os.access(script, os.X_OK)
