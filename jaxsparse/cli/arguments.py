# SPDX-License-Identifier: Apache-2.0
"""Arguments that several commands take, and what is done to them before they are parsed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from jaxsparse.data import OnBadRow


def option(metavar: str | None = None, text: str | None = None, name: str | None = None) -> Any:
    """An argument that may be left out: its help says what happens then."""
    return arg(name=name, metavar=metavar, help=text, help_behavior_hint="")


RunFile = Annotated[
    Positional[str | None],
    option("[RUN.toml]", "The run; without it the built-in synthetic example."),
]
RunDir = Annotated[Positional[str], arg(metavar="RUN_DIR", help="Folder that train left.")]
NewRunDir = Annotated[
    str | None,
    option(
        "FOLDER",
        "Of config, metrics and checkpoints; default runs/NAME, for a new run also NAME-2 and so "
        "on.",
    ),
]
Assignments = Annotated[
    tuple[str, ...],
    UseAppendAction,
    option(
        "SECTION.KEY=VALUE",
        "Instead of what the file says; one --set takes one or several.",
        name="set",
    ),
]
Devices = Annotated[
    int | None,
    option("N", "Force so many CPU devices instead of using the devices there are."),
]
Checkpoint = Annotated[
    str | None,
    option(
        "latest|best|STEP",
        "Which save; default the latest, with train.keep_best the best.",
    ),
]
BadRowPolicy = Annotated[
    OnBadRow | None,
    option(
        "error|skip",
        "Rows of files that cannot be used end the run, or are counted and left out.",
    ),
]
Step = Annotated[int | None, option("STEP")]
Json = Annotated[bool, FlagCreatePairsOff, option(text="Print the JSON line only.")]
Flag = Annotated[bool, FlagCreatePairsOff, option()]

_ASSIGNMENT = re.compile(r"[^=/\s]+\.[^=/\s]+=|\w+=\{")
"""How arguments behind the first one of ``--set`` begin that belong to it."""


def spread_sets(arguments: Sequence[str]) -> list[str]:
    """Gives every assignment its own ``--set``, and none to what follows them.

    >>> spread_sets(["train", "--set", "train.steps=2", "model.top=[8]", "run.toml", "--json"])
    ['train', '--set', 'train.steps=2', '--set', 'model.top=[8]', 'run.toml', '--json']
    """
    spread: list[str] = []
    first = last = False
    for argument in arguments:
        if last and not first and _ASSIGNMENT.match(argument):
            spread.append("--set")
        else:
            last = first or argument == "--set"
        first = argument == "--set"
        spread.append(argument)
    return spread
