# SPDX-License-Identifier: Apache-2.0
"""The folder a run leaves: ``config.toml``, ``metrics.jsonl``, TensorBoard events, checkpoints."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxsparse.ckpt import CheckpointManager
from jaxsparse.cli.resolve import dense_names
from jaxsparse.cli.run_config import RunConfig, load_config
from jaxsparse.cli.tell import tell
from jaxsparse.config import ConfigError, read_toml, to_table
from jaxsparse.config_text import to_toml
from jaxsparse.distributed import is_first
from jaxsparse.processes import gather
from jaxsparse.train.run_state import Resume

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
PICTURE = "training.png"
CHECKPOINTS = "checkpoints"
PROFILE = "profile"


def make_run_folder(
    config: RunConfig, given: str | None, resume: Resume = "never"
) -> tuple[Path, str | None]:
    """Makes the folder and writes the resolved configuration into it.

    Args:
        config: resolved.
        given: the folder; None is ``runs/<name>``, with a number behind it if that is taken and
            the run is a new one.
        resume: ``auto`` and ``must`` go on with the run that the folder holds.

    Returns:
        The folder, and the text of the configuration it had.

    Raises:
        ConfigError: see `check_run_folder`; or none can be made there.
    """
    path = check_run_folder(config, given, resume)
    old_text = None
    new = to_table(config)
    if (path / CONFIG).exists():
        old_text = (path / CONFIG).read_text(encoding="utf-8")
        for change in _changes(read_toml(path / CONFIG), new):
            tell(f"another configuration than the run had: {change}")
    try:
        path.mkdir(parents=True, exist_ok=True)
        _write_config(path, f"# The complete configuration of this run.\n\n{to_toml(new)}")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    return path, old_text


def check_run_folder(config: RunConfig, given: str | None, resume: Resume) -> Path:
    """Which folder a run would have; arguments as `make_run_folder`. Makes nothing.

    Raises:
        ConfigError: it holds a run that is not to be resumed, or none that must be, or it is a
            file; or its states were trained on other dense columns.
    """
    path = _free_folder(config.run.name) if resume == "never" else Path("runs", config.run.name)
    path = path if given is None else Path(given)
    holds_run = (path / CONFIG).exists()
    if holds_run and resume == "never":
        raise ConfigError(
            f"{path}: holds a run; give --run-dir a new folder, or go on with it by --resume auto"
        )
    if not holds_run and resume == "must":
        raise ConfigError(f"{path}: holds no run to go on with (--resume must)")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path}: is a file, expected a folder or a name for a new one")
    if holds_run and CheckpointManager(path / CHECKPOINTS).steps():
        check_dense(config, path)
    elif resume == "must":
        raise ConfigError(
            f"{path}: has no save to go on from (--resume must); --resume auto starts it anew"
        )
    return path


def check_dense(config: RunConfig, folder: Path) -> None:
    """Raises where the states of a run would get other dense columns than they were trained on.

    They know them by place alone: of equally many, nothing else would be wrong.

    Args:
        config: resolved.
        folder: of the run.

    Raises:
        ConfigError: names or order differ.
    """
    if not (folder / CONFIG).is_file():
        return
    saved, _ = load_config(folder / CONFIG, ())
    before, now = dense_names(saved), dense_names(config)
    if before != now:
        raise ConfigError(
            f"{folder}: its dense columns were {before}, now they are {now}; name those it was "
            "trained on, in their order (data.columns.dense), or train a new run"
        )


def restore_config(path: Path, text: str | None) -> None:
    """Brings back the configuration of a run that could not go on with another one."""
    if text is not None:
        _write_config(path, text)


def _write_config(path: Path, text: str) -> None:
    # Renamed: a run that is killed here keeps the file it had.
    temporary = path / f"{CONFIG}.new"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path / CONFIG)


def _changes(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """``section.key: before -> after`` of what differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            inner = f"{where}.{key}" if where else key
            yield from _changes(old.get(key), new.get(key), inner)
    elif old != new:
        yield f"{where}: {old!r} -> {new!r}"


def make_manager(run_dir: str | Path, config: RunConfig, **options: Any) -> CheckpointManager:
    """The saves of a run."""
    section = config.checkpoint
    return CheckpointManager(
        Path(run_dir, CHECKPOINTS),
        every=section.every,
        keep=section.keep,
        best="auc" if config.train.keep_best else None,
        background=section.background,
        **options,
    )


def saved_config(run_dir: str) -> str | None:
    """The configuration of the run a folder holds; None where it holds none."""
    path = Path(run_dir, CONFIG)
    return str(path) if path.is_file() else None


def share_run_folder(
    config: RunConfig, given: str | None, mesh: Mesh, resume: Resume
) -> tuple[Path, str | None]:
    """`make_run_folder` by process 0 of a job; every process gets the folder, or the error."""
    made: tuple[Path, str | None] = Path(), None
    error = ""
    if is_first():
        try:
            made = make_run_folder(config, given, resume)
        except ConfigError as refused:
            error = str(refused)
    made, error = gather(mesh, (made, error))[0]
    if error:
        raise ConfigError(error)
    return made


def find_config(run_dir: str) -> Path:
    """The configuration of a run.

    Raises:
        ConfigError: there is none.
    """
    path = Path(run_dir, CONFIG)
    if not path.is_file():
        raise ConfigError(f"{run_dir}: is not the folder of a run ({CONFIG} is missing)")
    return path


def find_checkpoint(run_dir: str | Path, config: RunConfig) -> Path:
    """The save a run is judged by: the latest, with ``train.keep_best`` the best one.

    Raises:
        ConfigError: the run has none.
    """
    manager = make_manager(run_dir, config)
    step = manager.best_step()
    step = manager.latest() if step is None else step
    if step is None:
        raise ConfigError(f"{run_dir}: has no checkpoint; did the training come to a save?")
    return manager.path(step)


def choose_checkpoint(run_dir: str | Path, config: RunConfig, which: str | None) -> Path:
    """A save of a run.

    Args:
        run_dir: folder of the run.
        config: of the run.
        which: ``latest``, ``best``, a step, or None as `find_checkpoint`.

    Raises:
        ConfigError: there is no such save.
    """
    if which is None:
        return find_checkpoint(run_dir, config)
    manager = CheckpointManager(Path(run_dir, CHECKPOINTS), best="auc")
    steps = manager.steps()
    if which in ("latest", "best"):
        step = manager.latest() if which == "latest" else manager.best_step()
        if step is None:
            why = "; train.keep_best saves after evaluations" if steps else ""
            raise ConfigError(f"{run_dir}: has no {which} checkpoint{why}")
        return manager.path(step)
    if not which.isdecimal():
        raise ConfigError(f"--checkpoint: expected latest, best or a step, got {which!r}")
    if int(which) not in steps:
        raise ConfigError(f"{run_dir}: no checkpoint at step {which}; there are {steps}")
    return manager.path(int(which))


def _free_folder(name: str) -> Path:
    candidates = (name if count == 1 else f"{name}-{count}" for count in itertools.count(1))
    return next(path for path in map(Path("runs").joinpath, candidates) if not path.exists())
