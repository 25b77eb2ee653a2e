# SPDX-License-Identifier: Apache-2.0
"""The commands as functions: their parameters are the arguments, their docstrings the help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from tyro.conf import Positional, arg

from jaxsparse import distributed
from jaxsparse.cli.arguments import (
    Assignments,
    BadRowPolicy,
    Checkpoint,
    Devices,
    Flag,
    Json,
    NewRunDir,
    RunDir,
    RunFile,
    Step,
    option,
)
from jaxsparse.cli.check import TOLERANCE, run_check
from jaxsparse.cli.devices import force_cpu_devices
from jaxsparse.cli.evaluate import run_eval
from jaxsparse.cli.inspect_ops import run_inspect_ops
from jaxsparse.cli.inspect_run import run_inspect
from jaxsparse.cli.launch import run_launch
from jaxsparse.cli.move_rows import run_export, run_import
from jaxsparse.cli.plan import run_plan
from jaxsparse.cli.predict import run_predict
from jaxsparse.cli.splits import SplitName, bad_row_assignment
from jaxsparse.cli.train import run_train
from jaxsparse.config import ConfigError
from jaxsparse.train.run_state import Resume


def commands(launched: Sequence[str]) -> dict[str, Callable[..., int]]:
    """All commands by name; ``launched`` is what launch runs."""
    return {
        "train": _train,
        "eval": _eval,
        "predict": _predict,
        "plan": _plan,
        "check": _check,
        "launch": _launcher(launched),
        "inspect": _inspect,
        "import": _import,
        "export": _export,
    }


def _train(
    run: RunFile = None,
    /,
    assignments: Assignments = (),
    run_dir: NewRunDir = None,
    resume: Resume = "never",
    on_bad_row: BadRowPolicy = None,
    allow_new: Flag = False,
    profile: Annotated[str | None, option("START:STOP")] = None,
    devices: Devices = None,
    json: Json = False,
) -> int:
    """Train a model, save it, and judge it on its test (or valid) data.

    Example: jaxsparse train run.toml --run-dir runs/a --set train.epochs=2

    Args:
        run: The run; without it the built-in synthetic example, with --resume the run in the
            folder.
        resume: Go on with the run in the folder: auto if there is one, must fails without.
        allow_new: Tables and parameters that the checkpoint lacks start from initial values.
        profile: Trace the steps from global step START to STOP into the run's folder.
    """
    _start(devices)
    return run_train(
        run,
        [*assignments, *bad_row_assignment(on_bad_row)],
        run_dir=run_dir,
        resume=resume,
        allow_new=allow_new,
        profile=profile,
        only_json=json,
    )


def _eval(
    run_dir: RunDir,
    /,
    checkpoint: Checkpoint = None,
    assignments: Assignments = (),
    on_bad_row: BadRowPolicy = None,
    devices: Devices = None,
    json: Json = False,
) -> int:
    """Evaluate the final state of a run on its test (or valid) data.

    Example: jaxsparse eval runs/a --set data.test=other.csv
    """
    _start(devices)
    given = [*assignments, *bad_row_assignment(on_bad_row)]
    return run_eval(run_dir, given, checkpoint=checkpoint, only_json=json)


def _predict(
    run: Annotated[
        Positional[str], arg(metavar="RUN", help="Folder that train left, or the run's TOML.")
    ],
    files: Annotated[
        Positional[tuple[str, ...]],
        arg(
            metavar="[FILE ...]",
            help="Data to predict instead of a split of the run.",
            help_behavior_hint="",
        ),
    ] = (),
    /,
    *,
    out: Annotated[str, arg(metavar="FILE")],
    split: Annotated[SplitName | None, option("SPLIT")] = None,
    checkpoint: Checkpoint = None,
    run_dir: Annotated[str | None, option("FOLDER")] = None,
    assignments: Assignments = (),
    devices: Devices = None,
    json: Json = False,
) -> int:
    """Write the probability and logit of every row of some data, in the order of the rows.

    Example: jaxsparse predict runs/a new.csv --out predictions.parquet

    Args:
        out: File to write, .parquet or .csv.
        split: train, valid or test; default test, without one valid.
        run_dir: The run's folder where RUN is a TOML; default runs/NAME.
    """
    force_cpu_devices(devices)
    return run_predict(
        run,
        files,
        assignments,
        out=out,
        split=split,
        checkpoint=checkpoint,
        run_dir=run_dir,
        only_json=json,
    )


def _plan(
    run: RunFile = None,
    /,
    assignments: Assignments = (),
    devices: Annotated[int | None, option("N")] = None,
    json: Json = False,
) -> int:
    """Print where the tables would go and their bytes by device; nothing is allocated.

    Example: jaxsparse plan run.toml --devices 64

    Args:
        devices: Plan for so many devices, which need not be there.
    """
    return run_plan(run, assignments, devices, only_json=json)


def _check(
    run: RunFile = None,
    /,
    assignments: Assignments = (),
    devices: Devices = None,
    tolerance: Annotated[float, arg(metavar="SHARE")] = TOLERANCE,
    json: Json = False,
) -> int:
    """Train ten steps on one device and on all, and print the largest difference by leaf.

    Example: jaxsparse check run.toml --devices 4

    Args:
        tolerance: Largest difference allowed, as a share of the leaf's largest change.
    """
    _start(devices)
    return run_check(run, assignments, tolerance, only_json=json)


def _inspect(
    run_dir: Annotated[
        Positional[str | None], option("[RUN_DIR]", "Folder that train left, or of checkpoints.")
    ] = None,
    /,
    step: Step = None,
    tiers: Flag = False,
    ops: Flag = False,
    json: Json = False,
) -> int:
    """Show what a run has saved: steps, metrics, tables, shapes, bytes.

    Example: jaxsparse inspect runs/a --step 1000

    Args:
        step: Of the save to describe; default the latest.
        tiers: Instead, where the rows of tables with dynamic keys or tiers lay at that save and how
            hot they were, with a picture in RUN_DIR.
        ops: Instead, which implementation each operation takes on this machine, and why.
    """
    if ops:
        if run_dir is not None or step is not None or tiers:
            raise ConfigError(
                "inspect --ops tells of this machine; leave RUN_DIR, --step and --tiers out"
            )
        return run_inspect_ops(only_json=json)
    if run_dir is None:
        raise ConfigError("inspect: name the RUN_DIR to show, or --ops")
    return run_inspect(run_dir, step, tiers=tiers, only_json=json)


def _import(
    run: Annotated[Positional[str], arg(metavar="RUN.toml", help="The run.")],
    files: Annotated[
        Positional[tuple[str, ...]],
        option("TABLE=FILE ...", "One or several."),
    ],
    /,
    assignments: Assignments = (),
    run_dir: NewRunDir = None,
    string_keys: Flag = False,
    devices: Devices = None,
) -> int:
    """Make a run at step 0 whose tables hold rows of files (npz, safetensors, Parquet, text).

    Example: jaxsparse import run.toml user=users.parquet --run-dir runs/b

    Args:
        string_keys: The keys of text files are strings, not integers.
    """
    force_cpu_devices(devices)
    return run_import(run, files, assignments, run_dir=run_dir, string_keys=string_keys)


def _export(
    run_dir: RunDir,
    table: Annotated[Positional[str], arg(metavar="TABLE", help="Name of the table.")],
    file: Annotated[
        Positional[str], arg(metavar="FILE", help="To write; its ending says the kind.")
    ],
    /,
    step: Step = None,
) -> int:
    """Write the rows of a table of a run to a file (npz, safetensors, Parquet, text).

    Example: jaxsparse export runs/a user users.npz

    Args:
        step: Of the save; default the one the run is judged by.
    """
    return run_export(run_dir, table, file, step)


def _launcher(command: Sequence[str]) -> Any:
    def _launch(
        processes: Annotated[int, arg(aliases=["-n"], metavar="N", help="How many processes.")] = 2,
        devices_per_process: Annotated[
            int,
            arg(
                metavar="N",
                help="CPU devices of each process; where there are GPUs, how many of them.",
            ),
        ] = 1,
    ) -> int:
        """Run train, eval or check in several processes of this machine; behind -- stands which.

        Example: jaxsparse launch -n 2 --devices-per-process 2 -- train run.toml
        """
        return run_launch(command, processes, devices_per_process)

    return _launch


def _start(devices: int | None) -> None:
    """Takes a process's place in its job, if it has one; before any device is used."""
    force_cpu_devices(devices)
    try:
        distributed.initialize()
    except ValueError as error:
        raise ConfigError(str(error)) from error
