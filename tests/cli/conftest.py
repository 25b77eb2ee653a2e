# SPDX-License-Identifier: Apache-2.0
"""What tests of commands share: a folder to run in, a run on files, and a short synthetic one."""

from __future__ import annotations

import pathlib

import pytest

from tests.cli.commands import Done, run_synthetic, write_files


@pytest.fixture
def in_an_empty_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def files(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run's TOML beside its data."""
    return write_files(tmp_path / "data")


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Done]:
    """The folder of a short synthetic run, and what it printed."""
    folder = tmp_path_factory.mktemp("synthetic") / "run"
    return folder, run_synthetic(folder)
