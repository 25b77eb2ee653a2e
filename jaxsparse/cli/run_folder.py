# SPDX-License-Identifier: Apache-2.0
"""The folder a run leaves: ``config.toml``, ``metrics.jsonl``, a picture of it, checkpoints."""

from __future__ import annotations

import itertools
from pathlib import Path

from jax.sharding import Mesh

from jaxsparse.cli.run_config import RunConfig
from jaxsparse.config import ConfigError, to_table
from jaxsparse.config_text import to_toml
from jaxsparse.distributed import is_first
from jaxsparse.processes import gather

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
PICTURE = "training.png"
CHECKPOINTS = "checkpoints"


def make_run_folder(config: RunConfig, given: str | None) -> Path:
    """Makes the folder and writes the resolved configuration into it.

    Args:
        config: resolved.
        given: the folder; None is ``runs/<name>``, with a number behind it if that is taken.

    Raises:
        ConfigError: the given folder holds a run, or none can be made there.
    """
    path = _free_folder(config.run.name) if given is None else Path(given)
    if (path / CONFIG).exists():
        raise ConfigError(f"{path}: holds a run; give --run-dir a new folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        text = f"# The complete configuration of this run.\n\n{to_toml(to_table(config))}"
        (path / CONFIG).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def share_run_folder(config: RunConfig, given: str | None, mesh: Mesh) -> Path:
    """`make_run_folder` by process 0 of a job; every process gets the folder, or the error."""
    made, error = "", ""
    if is_first():
        try:
            made = str(make_run_folder(config, given))
        except ConfigError as refused:
            error = str(refused)
    made, error = gather(mesh, (made, error))[0]
    if error:
        raise ConfigError(error)
    return Path(made)


def find_config(run_dir: str) -> Path:
    """The configuration of a run.

    Raises:
        ConfigError: there is none.
    """
    path = Path(run_dir, CONFIG)
    if not path.is_file():
        raise ConfigError(f"{run_dir}: is not the folder of a run ({CONFIG} is missing)")
    return path


def find_checkpoint(run_dir: str) -> Path:
    """The checkpoint with the largest step.

    Raises:
        ConfigError: the run has none.
    """
    folder = Path(run_dir, CHECKPOINTS)
    finished = [path for path in folder.glob("*") if path.name.isdecimal()]
    if not finished:
        raise ConfigError(f"{run_dir}: has no checkpoint; did the training end?")
    return max(finished, key=lambda path: int(path.name))


def _free_folder(name: str) -> Path:
    candidates = (name if count == 1 else f"{name}-{count}" for count in itertools.count(1))
    return next(path for path in map(Path("runs").joinpath, candidates) if not path.exists())
