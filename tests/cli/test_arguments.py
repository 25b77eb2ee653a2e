# SPDX-License-Identifier: Apache-2.0
"""Arguments that all commands share: help, version, ``--set``, ``--json``; learning rates."""

from __future__ import annotations

import itertools
import json
import pathlib
import re
from importlib.metadata import version
from typing import Any

import numpy as np
import optax
import pytest

from jaxsparse.cli.arguments import spread_sets
from jaxsparse.cli.check import Difference, report
from jaxsparse.cli.run_config import load_config
from jaxsparse.config import to_table
from jaxsparse.config_text import to_toml
from tests.cli.commands import captured, rows_of, sets, write_files
from tests.train.event_files import read_scalars

COMMANDS = ("train", "eval", "predict", "plan", "check", "launch", "inspect", "import", "export")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(*argv: str) -> str:
    done = captured(*argv)
    assert done.code == 2 and done.out == "" and "Traceback" not in done.err
    return done.err.split("jaxsparse: error: ")[1].removesuffix("\n")


# ---- help and version ------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_a_command_does_with_an_example(command: str) -> None:
    done = captured(command, "--help")
    assert done.code == 0
    text = done.out
    assert re.search(rf"^Example: jaxsparse {command} ", text, re.M)
    assert "None" not in text and "{" not in text.replace("{auto,never,must}", "")
    assert not re.search(r"\b(STR|INT|FLOAT)\b", text), "names say what to write"


def test_help_names_all_commands_and_the_version_is_told() -> None:
    text = captured("--help").out
    assert all(f"• {command} " in text for command in COMMANDS)
    assert captured("--version").out.startswith(f"jaxsparse {version('jaxsparse')} (jax ")


# ---- --set -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "positional"),
    [
        ("train --set a.b=1 run.toml", ["train", "run.toml"]),
        ("train --set a.b=1 c.d=[8] x={k=1} run.toml --json", ["train", "run.toml", "--json"]),
        ("import --set a.b=1 run.toml user=rows.npz", ["import", "run.toml", "user=rows.npz"]),
        ("import run.toml --set a.b=1 user=rows.npz", ["import", "run.toml", "user=rows.npz"]),
        ("train --set a.b=1 data/x.y=1/run.toml", ["train", "data/x.y=1/run.toml"]),
        ("eval --set a.b=1 --set a.c=2 runs/a", ["eval", "runs/a"]),
    ],
)
def test_a_set_takes_assignments_and_nothing_else(given: str, positional: list[str]) -> None:
    spread = spread_sets(given.split())
    taken = [value for before, value in itertools.pairwise(spread) if before == "--set"]
    assert all("=" in value for value in taken)
    assert [word for word in spread if word != "--set" and word not in taken] == positional


def test_a_positional_argument_may_stand_behind_a_set() -> None:
    message = "none.toml: no such file"
    assert refused("train", "--set", "train.steps=2", "none.toml") == message
    message = "none: is not the folder of a run (config.toml is missing)"
    assert refused("eval", "--set", "train.steps=2", "data.dir=x", "none") == message
    assert refused("plan", "--set", "epochs") == "--set 'epochs': expected section.key=value"


@pytest.mark.parametrize("command", ["train", "plan", "check"])
def test_values_that_are_too_much_for_toml_are_plain_errors(command: str) -> None:
    message = refused(command, "--set", f"train.steps={'9' * 5000}")
    assert message.startswith("--set 'train.steps=999") and len(message) < 400
    assert "... (5,012 characters)': cannot be read: Exceeds the limit" in message
    message = refused(command, "--set", f"train.steps={'[' * 5000}")
    assert "... (5,012 characters)': cannot be read: maximum recursion depth" in message
    pathlib.Path("deep.toml").write_text(f"a = {'[' * 5000}")
    assert refused(command, "deep.toml").startswith("deep.toml: not a TOML file: maximum recursion")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("table_defaults.keys=hashd", """'hashd' (a string); write { kind = "hashed" }"""),
        ("tables.user.optimizer=adagrad", """'adagrad' (a string); write { kind = "adagrad" }"""),
        ("optimizer=adam", "optimizer: expected a table with a key 'kind', got 'adam'"),
        ("data=files", """data: expected a table with a key 'kind', got 'files' (a string); """),
        ("optimizer.learning_rate=cosine", """or a table, got 'cosine' (a string); write { kind"""),
        ("optimizer.learning_rate=fast", "expected a number or a table, got 'fast' (a string)"),
    ],
)
def test_a_kind_without_its_table_gets_a_hint(assignment: str, message: str) -> None:
    assert message in refused("plan", "--set", assignment)


# ---- --json ----------------------------------------------------------------------------------


def test_plan_speaks_json() -> None:
    done = captured("plan", "--devices", "64", "--json")
    assert len(done.out.splitlines()) == 1
    assert done.result["devices"] == 64 and done.result["placements"]["user"] == "sharded"
    assert done.result["bytes"] == 64 * done.result["bytes_per_device"]


def test_check_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    differences = [Difference("b", 1.0, 2.0), Difference("a", 0.0, 0.0), Difference("c", 1.0, 0.0)]
    assert report(differences[:2], 0.5, 2, only_json=True) == 0
    told = {"agree": True, "devices": 2, "tolerance": 0.5, "differ": []}
    assert json.loads(capsys.readouterr().out) == {**told, "shares": {"b": 0.5, "a": 0.0}}
    assert report(differences, 0.5, 2, only_json=True) == 1
    told |= {"agree": False, "differ": ["c"]}
    assert json.loads(capsys.readouterr().out)["differ"] == ["c"]
    assert report(differences, 0.1, 2, only_json=False) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "b       1.00e+00    2.00e+00   5.0e-01",
        "c       1.00e+00    0.00e+00       inf",
        "1 more that the steps did not change, equal on both",
        "1 device and 2 devices: differ by more than 0.1 of their change: b, c",
    ]


# ---- learning rates --------------------------------------------------------------------------

RATES: list[tuple[str, Any]] = [
    ("{kind='constant', value=0.1}", optax.constant_schedule(0.1)),
    (
        "{kind='linear', init_value=0.1, end_value=0.0, transition_steps=4, transition_begin=1}",
        optax.linear_schedule(0.1, 0.0, 4, 1),
    ),
    (
        "{kind='cosine', init_value=0.1, decay_steps=5, alpha=0.1}",
        optax.cosine_decay_schedule(0.1, 5, 0.1),
    ),
    (
        "{kind='warmup_cosine', peak_value=0.1, warmup_steps=2, decay_steps=6, end_value=0.01}",
        optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 6, 0.01),
    ),
    (
        "{kind='exponential', init_value=0.1, transition_steps=2, decay_rate=0.5, staircase=true}",
        optax.exponential_decay(0.1, 2, 0.5, staircase=True),
    ),
    (
        "{kind='piecewise', init_value=0.1, boundaries=[2, 5], scales=[0.5, 0.1]}",
        optax.piecewise_constant_schedule(0.1, {2: 0.5, 5: 0.1}),
    ),
]


@pytest.mark.parametrize(("text", "schedule"), RATES)
def test_rates_are_optaxs_for_tables_and_the_dense_model(text: str, schedule: Any) -> None:
    assignments = [
        f"table_defaults.optimizer.learning_rate={text}",
        f"optimizer.learning_rate={text}",
    ]
    config, _ = load_config(None, assignments)
    again = load_config(None, assignments)[0]
    for rate in (config.optimizer.learning_rate, config.table_defaults.optimizer.learning_rate):
        for step in range(8):
            assert float(rate(np.int32(step))) == pytest.approx(float(schedule(step)), rel=1e-6)
    assert config == again and hash(config.optimizer) == hash(again.optimizer)
    # What a run's folder says of it is read back as the same.
    pathlib.Path("written.toml").write_text(to_toml(to_table(config)))
    assert load_config("written.toml", ())[0] == config


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        ("{kind='constant', value=1e300}", "learning_rate: value must be a float32, got 1e+300"),
        (
            "{kind='exponential', init_value=1, decay_rate=2, transition_steps=1, end_value=1e39}",
            "learning_rate: end_value must be a float32, got 1e+39",
        ),
        (
            "{kind='piecewise', init_value=1, boundaries=[5], scales=[1e300]}",
            "learning_rate: scales must be a float32, got 1e+300",
        ),
        (
            "{kind='piecewise', init_value=1, boundaries=[5, 2147483648], scales=[1, 1]}",
            "learning_rate: boundaries must be < 2147483648, got 2147483648",
        ),
        (
            "{kind='cosine', init_value=1, decay_steps=2147483648}",
            "learning_rate: decay_steps must be < 2147483648, got 2147483648",
        ),
        (
            "{kind='warmup_cosine', peak_value=1, warmup_steps=5, decay_steps=2147483648}",
            "learning_rate: decay_steps must be < 2147483648, got 2147483648",
        ),
        (
            "{kind='linear', init_value=1, end_value=0, transition_steps=1, "
            "transition_begin=99999999999}",
            "learning_rate: transition_begin must be < 2147483648, got 99999999999",
        ),
        ("nan", "learning_rate: expected a finite number, got nan (a number)"),
        ("{kind='linaer'}", ".kind: expected one of constant, linear, cosine, warmup_cosine, expo"),
        ("{kind='cosine', decay_step=3, init_value=1}", "unknown key, did you mean 'decay_steps'?"),
        ("{kind='cosine', decay_steps=3}", "learning_rate.init_value: is missing, expected a numb"),
        ("{kind='constant', value=-1}", "learning_rate: value must be >= 0, got -1"),
        (
            "{kind='linear', init_value=1, end_value=0, transition_steps=0}",
            "learning_rate: transition_steps must be > 0, got 0",
        ),
        (
            "{kind='warmup_cosine', peak_value=1, warmup_steps=5, decay_steps=5}",
            "decay_steps counts the warm-up too, so it must be > warmup_steps = 5, got 5",
        ),
        (
            "{kind='piecewise', init_value=1, boundaries=[5, 5], scales=[1, 1]}",
            "boundaries must ascend from >= 1, got [5, 5]",
        ),
        (
            "{kind='piecewise', init_value=1, boundaries=[0], scales=[1]}",
            "boundaries must ascend from >= 1, got [0]",
        ),
        (
            "{kind='piecewise', init_value=1, boundaries=[5], scales=[-1]}",
            "scales must be >= 0, got [-1.0]",
        ),
        (
            "{kind='piecewise', init_value=1, boundaries=[5], scales=[]}",
            "boundaries and scales must be equally many, got 1 and 0",
        ),
        ("-1", "must be "),
    ],
)
@pytest.mark.parametrize("section", ["optimizer", "table_defaults.optimizer"])
def test_rates_that_cannot_be_are_refused(section: str, rate: str, message: str) -> None:
    assert message in refused("plan", "--set", f"{section}.learning_rate={rate}")


# ---- --profile, events, and rates in a run -----------------------------------------------------


@pytest.mark.parametrize("text", ["5", "5:", ":5", "a:b", "5:5", "6:5", "-1:3", "1:2:3"])
def test_steps_to_profile_are_two_numbers(text: str) -> None:
    message = f"--profile: expected START:STOP, two global steps with START < STOP, got {text!r}"
    assert refused("train", f"--profile={text}") == message
    assert list(pathlib.Path().iterdir()) == []


@pytest.mark.slow
def test_a_run_with_rates_is_traced_and_resumed(tmp_path: pathlib.Path) -> None:
    rate = "{kind='linear', init_value=0.05, end_value=0.01, transition_steps=8}"
    options = sets(
        f"data.dir={tmp_path}",
        "mesh.devices=1",
        "train.log_every=2",
        f"optimizer={{kind='adam', learning_rate={rate}}}",
        f"table_defaults.optimizer={{kind='adagrad', learning_rate={rate}}}",
    )
    toml = str(write_files(tmp_path))
    whole = captured("train", toml, "--run-dir", "whole", *options, "--set", "train.steps=8")
    assert whole.code == 0, whole.err
    first = captured("train", toml, "--run-dir", "a", *options, "--set", "train.steps=4")
    assert first.result["step"] == 4
    resume = ("--run-dir", "a", "--resume", "must", "--profile", "2:6")
    done = captured("train", "--set", "train.steps=8", *resume)
    assert done.code == 0, done.err
    assert done.result["loss"] == whole.result["loss"], "the rate goes on where it was"
    assert "profile of steps 4 to 6 in a/profile: open its perfetto_trace.json.gz" in done.err
    assert len(list(pathlib.Path("a/profile").rglob("perfetto_trace.json.gz"))) == 1
    # TensorBoard shows what metrics.jsonl holds, after the resumption too.
    scalars = read_scalars(pathlib.Path("a"))
    for row in rows_of(pathlib.Path("a")):
        for name in ("loss", "auc"):
            value = scalars[f"{row['kind']}/{name}"][row["step"]]
            assert value == pytest.approx(row[name], rel=1e-6), (name, row["step"])
    assert list(scalars["train/loss"]) == [2, 4, 6, 8]


def test_an_existing_run_is_refused_before_data_are_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.toml").write_text("")
    files = {"kind": "files", "train": "none.csv", "valid": "none.csv"}
    data = ", ".join(f"{name} = {json.dumps(value)}" for name, value in files.items())
    text = (
        f"data = {{ {data}, columns = {{ features = {{ x = 'x' }} }} }}\n"
        "[table_defaults]\nvocabulary_size = 9\n"
    )
    pathlib.Path("run.toml").write_text(text)
    assert "none.csv: no such file" in refused("train", "run.toml")
    assert refused("train", "run.toml", "--run-dir", "a").startswith("a: holds a run; give --run")
