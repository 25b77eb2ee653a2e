# SPDX-License-Identifier: Apache-2.0
"""``jaxsparse launch``: a command of its own in several processes on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxsparse.config import ConfigError
from jaxsparse.launch import launch

COMMANDS = ("train", "eval", "check")
"""What several processes can do together."""


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments of launch itself, and what stands behind ``--``.

    >>> split_command(["launch", "-n", "2", "--", "train", "--json"])
    (['launch', '-n', '2'], ['train', '--json'])
    >>> split_command(["train", "--json"])
    (['train', '--json'], [])
    """
    arguments = list(arguments)
    if arguments[:1] != ["launch"] or "--" not in arguments:
        return arguments, []
    where = arguments.index("--")
    return arguments[:where], arguments[where + 1 :]


def run_launch(command: Sequence[str], num_processes: int, devices_per_process: int) -> int:
    """Runs ``jaxsparse COMMAND`` as one job; returns its exit code.

    Raises:
        ConfigError: there is no command, or not one for several processes, or a count is below 1.
    """
    if not command:
        raise ConfigError("launch: what to run is missing; write it behind --, as in -- train")
    if command[0] not in COMMANDS:
        raise ConfigError(f"launch: runs one of {', '.join(COMMANDS)}, got {command[0]!r}")
    try:
        return launch(
            [sys.executable, "-m", "jaxsparse", *command], num_processes, devices_per_process
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
