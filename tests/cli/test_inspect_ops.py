# SPDX-License-Identifier: Apache-2.0
"""``inspect --ops`` tells which implementation runs, and why."""

from __future__ import annotations

import pytest

from jaxsparse.ops import paths
from jaxsparse.ops.native import library
from tests.cli.commands import last_json, run


def test_every_operation_has_a_line(capsys):
    assert run("inspect", "--ops") == 0
    out = capsys.readouterr().out
    told = last_json(out)
    assert told["platform"] == "cpu" and len(told["ops"]) >= 1
    for line, one in zip(out.splitlines()[1:-1], told["ops"], strict=True):
        assert line.split(maxsplit=2) == [one["op"], one["path"], one["why"]]
    assert run("inspect", "--ops", "--json") == 0
    assert last_json(capsys.readouterr().out) == told


def test_what_is_missing_is_told(monkeypatch):
    monkeypatch.setattr(library, "is_available", lambda: False)
    monkeypatch.setattr(library, "why_not", lambda: "no compiler")
    for choice in paths.choices("cpu"):
        assert (choice.path, choice.why) == ("xla", "no native kernels: no compiler")
    for choice in paths.choices("tpu"):
        expected = "there are kernels for CPUs and NVIDIA GPUs, none for tpu"
        assert (choice.path, choice.why) == ("xla", expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("runs/a", "--ops"),
            "inspect --ops tells of this machine; leave RUN_DIR, --step and --tiers out",
        ),
        ((), "inspect: name the RUN_DIR to show, or --ops"),
    ],
)
def test_inspect_needs_one_thing_to_show(capsys, arguments, message):
    assert run("inspect", *arguments) == 2
    assert message in capsys.readouterr().err
