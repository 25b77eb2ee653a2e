# SPDX-License-Identifier: Apache-2.0
"""What is shipped is the package, each file once; the root links are for people only."""

from __future__ import annotations

import collections
import importlib.util
import os
import pathlib
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINKS = ("ops", "train", "ckpt")

CHECK_INSTALLED = f"""
import importlib.util, pathlib, sys
import jaxsparse
assert pathlib.Path(jaxsparse.__file__).is_relative_to(sys.prefix), jaxsparse.__file__
for name in {LINKS}:
    assert importlib.util.find_spec("jaxsparse." + name), name
    assert importlib.util.find_spec(name) is None, f"a top-level {{name}} was installed"
"""


def package_files() -> set[str]:
    """Every file of the package in the tree, as ``jaxsparse/...``."""
    found = (path for path in (ROOT / "jaxsparse").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts}


def run(*command: str | pathlib.Path, cwd: pathlib.Path) -> str:
    """Run a command away from the tree, with nothing of it on the import path."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("name", LINKS)
def test_root_links_are_relative_and_right(name: str) -> None:
    assert os.readlink(ROOT / name) == f"jaxsparse/{name}"
    assert (ROOT / name).resolve() == ROOT / "jaxsparse" / name
    assert (ROOT / name).is_dir()


@pytest.mark.parametrize("name", LINKS)
def test_importing_through_a_root_link_is_banned(name: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--no-cache"]
    source = f"import {name}\nfrom {name}.x import y\nimport jaxsparse.{name}\n"
    done = subprocess.run(
        [*command, "--stdin-filename", "jaxsparse/example.py", "-"],
        cwd=ROOT,
        input=source,
        capture_output=True,
        text=True,
    )
    assert done.stdout.count("TID251") == 2, done.stdout + done.stderr
    assert f"import jaxsparse.{name}" in done.stdout


def test_tools_are_pointed_at_the_package_not_at_the_links() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tool["mypy"]["files"] == ["jaxsparse"]
    assert tool["pytest"]["ini_options"]["testpaths"] == ["tests"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Folder with the sdist, and the wheel made from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return out


def only(folder: pathlib.Path, pattern: str) -> pathlib.Path:
    found = list(folder.glob(pattern))
    assert len(found) == 1, found
    return found[0]


@pytest.mark.slow
def test_wheel_holds_the_tree_once(built: pathlib.Path) -> None:
    with zipfile.ZipFile(only(built, "*.whl")) as wheel:
        names = collections.Counter(wheel.namelist())
    shipped = {name for name in names if ".dist-info/" not in name}
    assert max(names.values()) == 1
    assert shipped == package_files()
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_sdist_holds_the_tree_once(built: pathlib.Path) -> None:
    with tarfile.open(only(built, "*.tar.gz")) as sdist:
        members = sdist.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    names = collections.Counter(member.name.partition("/")[2] for member in members)
    assert max(names.values()) == 1
    assert {name for name in names if name.startswith("jaxsparse/")} == package_files()
    beside = {name for name in names if not name.startswith("jaxsparse/")}
    expected = {"CHANGELOG.md", "LICENSE", "README.md", "constraints.txt", "pyproject.toml"}
    assert expected <= beside <= expected | {"PKG-INFO", ".gitignore"}


@pytest.mark.slow
def test_wheel_works_in_a_clean_environment(built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    wheel = only(built, "*.whl")
    has_uv = importlib.util.find_spec("uv") is not None
    installer = [sys.executable, "-m", "uv", "pip", "install", "--python", python]
    if not has_uv:
        installer = [python, "-m", "pip", "install"]
    run(*installer, "-q", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)

    run(python, "-c", CHECK_INSTALLED, cwd=tmp_path)
    assert "train" in run(venv / "bin" / "jaxsparse", "--help", cwd=tmp_path)
    assert "train" in run(python, "-m", "jaxsparse", "--help", cwd=tmp_path)


def test_the_root_shows_the_public_names_alone() -> None:
    import jaxsparse as js

    assert dir(js) == sorted(js.__all__)
    assert all(hasattr(js, name) for name in js.__all__)
