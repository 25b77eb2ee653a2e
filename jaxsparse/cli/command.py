# SPDX-License-Identifier: Apache-2.0
"""The command ``jaxsparse``: its exit codes, and how errors are told."""

from __future__ import annotations

import logging
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version

import jax
import tyro

from jaxsparse import distributed
from jaxsparse.ckpt import CheckpointError, SaveError
from jaxsparse.ckpt.rows import RowFileError
from jaxsparse.cli.arguments import spread_sets
from jaxsparse.cli.commands import commands
from jaxsparse.cli.launch import split_command
from jaxsparse.config import ConfigError
from jaxsparse.data import DataError

DONE, FAILED, BAD_INPUT = 0, 1, 2

DESCRIPTION = (
    "Train recommendation models with huge embedding tables, exactly. `jaxsparse COMMAND --help` "
    "says more of each command, `jaxsparse --version` what is installed."
)


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
    if arguments == ["--version"]:
        jax_version, python = jax.__version__, platform.python_version()
        print(f"jaxsparse {version('jaxsparse')} (jax {jax_version}, Python {python})")
        return DONE
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax tells of its every move
    try:
        done: int = tyro.extras.subcommand_cli_from_dict(
            commands(launched),
            prog="jaxsparse",
            description=DESCRIPTION,
            args=spread_sets(arguments),
        )
        return done
    except SystemExit as stop:  # --help and wrong arguments; tyro has told why
        return stop.code if isinstance(stop.code, int) else FAILED
    except (ConfigError, DataError, CheckpointError, RowFileError) as error:
        print(f"{_name()}: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except (FloatingPointError, SaveError, KeyboardInterrupt) as error:
        print(f"{_name()}: failed: {str(error) or 'interrupted'}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception:
        traceback.print_exc()
        return FAILED


def _name() -> str:
    """Who speaks: in a job, which process."""
    job = distributed.joined()
    return "jaxsparse" if job is None else f"jaxsparse: process {job.process_id}"
