# SPDX-License-Identifier: Apache-2.0
"""Arguments of the command ``jaxsparse``, its exit codes, and how errors are told."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import tyro
from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from jaxsparse import distributed
from jaxsparse.ckpt import CheckpointError, SaveError
from jaxsparse.ckpt.rows import RowFileError
from jaxsparse.cli.check import TOLERANCE, run_check
from jaxsparse.cli.evaluate import run_eval
from jaxsparse.cli.inspect_run import run_inspect
from jaxsparse.cli.launch import run_launch, split_command
from jaxsparse.cli.move_rows import run_export, run_import
from jaxsparse.cli.plan import run_plan
from jaxsparse.cli.splits import bad_row_assignment
from jaxsparse.cli.train import run_train
from jaxsparse.config import ConfigError
from jaxsparse.data import DataError, OnBadRow
from jaxsparse.train.run_state import Resume

DONE, FAILED, BAD_INPUT = 0, 1, 2

RunFile = Positional[str | None]
Assignments = Annotated[
    tuple[tuple[str, ...], ...],
    UseAppendAction,
    arg(name="set", metavar="SECTION.KEY=VALUE ...", help="Instead of what the file says."),
]
Devices = Annotated[
    int | None, arg(help="Force this many CPU devices instead of using the devices there are.")
]
BadRowPolicy = Annotated[
    OnBadRow | None,
    arg(help="Rows of files that cannot be used end the run, or are counted and left out."),
]
Json = Annotated[bool, FlagCreatePairsOff, arg(help="Print the JSON line only.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: arguments without the command's name; default those of the process.

    Returns:
        0: done; 2: bad input or configuration, told in one message; 1: any other failure.

    >>> main(["plan", "--set", "train.epoch=2"])
    2
    """
    return distributed.exit_from_job(_run(argv))


def _run(argv: Sequence[str] | None) -> int:
    arguments, launched = split_command(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Any] = {
        "train": _train,
        "eval": _eval,
        "plan": _plan,
        "check": _check,
        "launch": _launcher(launched),
        "inspect": _inspect,
        "import": _import,
        "export": _export,
    }
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax tells of its every move
    try:
        done: int = tyro.extras.subcommand_cli_from_dict(
            commands,
            prog="jaxsparse",
            description="Train recommendation models with huge embedding tables, exactly.",
            args=arguments,
        )
        return done
    except SystemExit as stop:  # --help and wrong arguments; tyro has told why
        return stop.code if isinstance(stop.code, int) else FAILED
    except (ConfigError, DataError, CheckpointError, RowFileError) as error:
        print(f"{_name()}: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except (FloatingPointError, SaveError, KeyboardInterrupt) as error:
        print(f"{_name()}: failed: {error or 'interrupted'}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception:
        traceback.print_exc()
        return FAILED


def _train(
    run: RunFile = None,
    /,
    assignments: Assignments = (),
    run_dir: str | None = None,
    resume: Resume = "never",
    on_bad_row: BadRowPolicy = None,
    allow_new: Annotated[bool, FlagCreatePairsOff] = False,
    devices: Devices = None,
    json: Json = False,
) -> int:
    """Train a model; without RUN the built-in synthetic example.

    Args:
        run: The run's TOML; with --resume default the one in the run's folder.
        run_dir: Folder of config, metrics and checkpoints; default runs/NAME, for a new run also
            NAME-2 and so on.
        resume: Go on with the run in the folder: auto if there is one, must fails without.
        allow_new: Tables and parameters that the checkpoint lacks start from initial values.
    """
    _start(devices)
    return run_train(
        run,
        _flat(assignments) + bad_row_assignment(on_bad_row),
        run_dir=run_dir,
        resume=resume,
        allow_new=allow_new,
        only_json=json,
    )


def _eval(
    run_dir: Positional[str],
    /,
    assignments: Assignments = (),
    on_bad_row: BadRowPolicy = None,
    devices: Devices = None,
    json: Json = False,
) -> int:
    """Evaluate the final state of a run on its test (or valid) data.

    Args:
        run_dir: Folder that train left.
    """
    _start(devices)
    given = _flat(assignments) + bad_row_assignment(on_bad_row)
    return run_eval(run_dir, given, only_json=json)


def _plan(run: RunFile = None, /, assignments: Assignments = (), devices: int | None = None) -> int:
    """Print where the tables would go and their bytes by device; nothing is allocated.

    Args:
        run: The run's TOML; without it the built-in synthetic example.
        devices: Plan for this many devices, which need not be there.
    """
    return run_plan(run, _flat(assignments), devices)


def _check(
    run: RunFile = None,
    /,
    assignments: Assignments = (),
    devices: Devices = None,
    tolerance: float = TOLERANCE,
) -> int:
    """Ten steps on one device and on all, and the largest difference by leaf.

    Args:
        run: The run's TOML; without it the built-in synthetic example.
        tolerance: Largest difference allowed, as a share of the leaf's largest change.
    """
    _start(devices)
    return run_check(run, _flat(assignments), tolerance)


def _inspect(run_dir: Positional[str], /, step: int | None = None, json: Json = False) -> int:
    """Show what a run has saved: steps, metrics, tables, shapes, bytes.

    Args:
        run_dir: Folder that train left, or its folder of checkpoints.
        step: Of the save to describe; default the latest.
    """
    return run_inspect(run_dir, step, only_json=json)


def _import(
    run: Positional[str],
    files: Positional[tuple[str, ...]],
    /,
    assignments: Assignments = (),
    run_dir: str | None = None,
    string_keys: Annotated[bool, FlagCreatePairsOff] = False,
    devices: Devices = None,
) -> int:
    """Make a run at step 0 whose tables hold rows of files (npz, safetensors, Parquet, text).

    Args:
        run: The run's TOML.
        files: TABLE=FILE, one or several.
        run_dir: Folder of the run; default runs/NAME, or NAME-2 and so on.
        string_keys: The keys of text files are strings, not integers.
    """
    force_cpu_devices(devices)
    return run_import(run, files, _flat(assignments), run_dir=run_dir, string_keys=string_keys)


def _export(
    run_dir: Positional[str],
    table: Positional[str],
    file: Positional[str],
    /,
    step: int | None = None,
) -> int:
    """Write the rows of a table of a run to a file (npz, safetensors, Parquet, text).

    Args:
        run_dir: Folder that train left.
        table: Name of the table.
        file: To write; its ending says the kind.
        step: Of the save; default the one the run is judged by.
    """
    return run_export(run_dir, table, file, step)


def _launcher(command: list[str]) -> Any:
    def _launch(
        processes: Annotated[int, arg(aliases=["-n"], help="How many processes.")] = 2,
        devices_per_process: Annotated[
            int, arg(help="CPU devices of each process; where there are GPUs, how many of them.")
        ] = 1,
    ) -> int:
        """Run a command in several processes of this machine: launch -n 2 -- train RUN."""
        return run_launch(command, processes, devices_per_process)

    return _launch


def _start(devices: int | None) -> None:
    """Takes a process's place in its job, if it has one; before any device is used."""
    force_cpu_devices(devices)
    try:
        distributed.initialize()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _name() -> str:
    """Who speaks: in a job, which process."""
    job = distributed.joined()
    return "jaxsparse" if job is None else f"jaxsparse: process {job.process_id}"


def force_cpu_devices(count: int | None) -> None:
    """Makes jax show ``count`` CPU devices; has to come before its first computation.

    Raises:
        ConfigError: the count is not positive, or jax has started with fewer devices.
    """
    if count is None:
        return
    if count < 1:
        raise ConfigError(f"--devices: must be >= 1, got {count}")
    try:
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:
        there = len(jax.devices())
        if there < count:
            raise ConfigError(
                f"--devices: {count} asked for, but jax has started with {there}"
            ) from None


def _flat(assignments: tuple[tuple[str, ...], ...]) -> list[str]:
    return [one for several in assignments for one in several]
