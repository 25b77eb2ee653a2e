# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows is what the program takes."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tomllib
import typing

from jaxsparse.cli.commands import commands
from jaxsparse.cli.run_config import SYNTHETIC, RunConfig
from jaxsparse.cli.schedules import Rate
from jaxsparse.config import parse, read_toml
from jaxsparse.dynamic import Dynamic

TEXT = (pathlib.Path(__file__).parents[1] / "docs" / "command_line.md").read_text()


def test_the_tables_of_the_documentation_are_read() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", TEXT, re.S)
    assert blocks
    for block in blocks:
        table = {**read_toml(SYNTHETIC), **tomllib.loads(block)}
        config = parse(RunConfig, table, "docs/command_line.md")
        if "learning_rate" in block:
            assert callable(config.optimizer.learning_rate)
            assert callable(config.table_defaults.optimizer.learning_rate)
        if "dynamic" in block:
            assert isinstance(config.tables["user"].keys, Dynamic)


def test_every_command_and_every_rate_is_described() -> None:
    for name in commands(()):
        assert re.search(rf"^\|.*`{name} ", TEXT, re.M), name
    (kinds,) = typing.get_args(typing.get_args(Rate)[1])[1:]
    for kind, cls in kinds.classes.items():
        (row,) = re.findall(rf"^\| `{kind}` \| (.*) \|$", TEXT, re.M)
        told = re.findall(r"`(\w+)", row)
        assert told == [field.name for field in dataclasses.fields(cls)]
