# SPDX-License-Identifier: Apache-2.0
"""Configuration: what is read, what is refused and in which words, and that writing is reading."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tomllib
from typing import Annotated, Any, Literal

import pytest

from jaxsparse.config import ConfigError, one_of, override, parse, read_toml, to_table
from jaxsparse.config_text import to_toml
from jaxsparse.hashing import Hashed
from jaxsparse.optimizers import SGD, Adam


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    width: int
    activation: Literal["relu", "tanh"] = "relu"

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width must be >= 1, got {self.width}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    name: str = "a"
    rate: float = 0.5
    shuffle: bool = True
    steps: int | None = None
    layers: tuple[Layer, ...] = ()
    tables: dict[str, Layer] = dataclasses.field(default_factory=dict)
    rule: Annotated[Any, one_of(adam=Adam, sgd=SGD)] = SGD(0.1)
    other_rule: Annotated[Any, one_of(adam=Adam, sgd=SGD)] | None = None


def load(text: str) -> Config:
    return parse(Config, tomllib.loads(text), "run.toml")


def test_every_kind_of_value_is_read() -> None:
    got = load(
        """
        name = "b"
        rate = 1
        shuffle = false
        steps = 7
        layers = [{ width = 8 }, { width = 4, activation = "tanh" }]
        tables.user.width = 3
        rule = { kind = "adam", learning_rate = 1e-3, b1 = 0.5 }
        [other_rule]
        kind = "sgd"
        learning_rate = 1
        """
    )
    assert got == Config(
        name="b",
        rate=1.0,
        shuffle=False,
        steps=7,
        layers=(Layer(width=8), Layer(width=4, activation="tanh")),
        tables={"user": Layer(width=3)},
        rule=Adam(1e-3, b1=0.5),
        other_rule=SGD(1.0),
    )
    assert got.rule.learning_rate == 1e-3 and type(got.rate) is float
    assert load("") == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "shufle = true",
            "run.toml: shufle: unknown key, did you mean 'shuffle'?; known: name, rate, shuffle, "
            "steps, layers, tables, rule, other_rule",
        ),
        ("zzz = 1", "run.toml: zzz: unknown key; known: name, rate"),
        ("name = 3", "run.toml: name: expected a string, got 3 (an integer)"),
        ("rate = 'x'", "run.toml: rate: expected a number, got 'x' (a string)"),
        ("rate = nan", "run.toml: rate: expected a finite number, got nan (a number)"),
        ("shuffle = 1", "run.toml: shuffle: expected true or false, got 1 (an integer)"),
        ("steps = true", "run.toml: steps: expected an integer, got True (a boolean)"),
        ("steps = 1.0", "run.toml: steps: expected an integer, got 1.0 (a number)"),
        ("layers = 3", "run.toml: layers: expected a list, each item a table, got 3"),
        ("layers = [3]", "run.toml: layers.0: expected a table, got 3 (an integer)"),
        ("layers = [{}]", "run.toml: layers.0.width: is missing, expected an integer"),
        ("tables = 3", "run.toml: tables: expected a table, got 3 (an integer)"),
        ("tables.user = 3", "run.toml: tables.user: expected a table, got 3 (an integer)"),
        ("tables.user.width = 0", "run.toml: tables.user: width must be >= 1, got 0"),
        (
            "tables.user = {width = 1, activation = 'rely'}",
            "run.toml: tables.user.activation: expected one of relu, tanh, did you mean 'relu'?, "
            "got 'rely'",
        ),
        ("rule = 3", "run.toml: rule: expected a table with a key 'kind', got 3 (an integer)"),
        ("rule.learning_rate = 1", "run.toml: rule: needs a key 'kind', one of adam, sgd"),
        (
            "rule.kind = 'adan'",
            "run.toml: rule.kind: expected one of adam, sgd, did you mean 'adam'?, got 'adan'",
        ),
        (
            "rule = {kind = 'sgd', b1 = 1}",
            "run.toml: rule.b1: unknown key; known: learning_rate, l2, weight_decay",
        ),
        (
            "rule = {kind = 'sgd', learning_rate = -1}",
            "run.toml: rule: SGD: learning_rate must be a finite float >= 0",
        ),
        (
            "other_rule = {kind = 'sgd', learning_rate = 'x'}",
            "run.toml: other_rule.learning_rate: expected a number, got 'x' (a string)",
        ),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(text)


def test_a_union_of_scalars_names_all_alternatives() -> None:
    @dataclasses.dataclass(frozen=True)
    class Either:
        size: int | Literal["auto"] = "auto"

    globals()["Either"] = Either
    assert parse(Either, {"size": 3}, "x").size == 3
    message = "x: size: expected an integer or one of auto, got 'much' (a string)"
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(Either, {"size": "much"}, "x")


def test_a_table_beside_other_alternatives_names_its_own_fault() -> None:
    from jaxsparse.data import ColumnSchema

    message = "x: features.a.typ: unknown key, did you mean 'type'?; known: column, type, separator"
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(ColumnSchema, {"features": {"a": {"typ": "string"}}}, "x")
    got = parse(ColumnSchema, {"features": {"a": "b", "c": {"type": "string"}}}, "x")
    assert to_table(got)["features"] == {"a": "b", "c": {"type": "string"}}


def test_hashed_keys_are_written_as_they_were_given() -> None:
    @dataclasses.dataclass(frozen=True)
    class Keys:
        keys: Annotated[Any, one_of(hashed=Hashed)]

    globals()["Keys"] = Keys
    for exact in (["ü", "hat"], [2**63 - 1, 3]):
        table = {"keys": {"kind": "hashed", "exact_keys": exact, "seed": 3}}
        assert tomllib.loads(to_toml(to_table(parse(Keys, table, "x")))) == table


def test_files_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: no such file"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        read_toml(tmp_path)
    path = tmp_path / "bad.toml"
    path.write_text("a = 1\nb = = 2\n")
    with pytest.raises(ConfigError, match=r"bad\.toml: not a TOML file: .*line 2"):
        read_toml(path)
    path.write_bytes(b"a = '\xff'\n")
    with pytest.raises(ConfigError, match=r"bad\.toml: not a TOML file: 'utf-8' codec"):
        read_toml(path)


def test_overrides_make_sections_and_leave_the_original_alone() -> None:
    table = {"train": {"epochs": 1}}
    got = override(table, ["train.epochs = 3", "a.b.c=true", "a.d=x=y", 'e="quoted"'])
    assert got == {
        "train": {"epochs": 3},
        "a": {"b": {"c": True}, "d": "x=y"},
        "e": "quoted",
    }
    assert table == {"train": {"epochs": 1}}


def test_an_override_cannot_smuggle_in_a_second_key() -> None:
    assert override({}, ["a=1\nb=2"]) == {"a": "1\nb=2"}


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("train.epochs", "--set 'train.epochs': expected section.key=value"),
        ("=3", "--set '=3': expected section.key=value"),
        ("a..b=3", "--set 'a..b=3': expected section.key=value"),
        ("name.x=3", "--set 'name.x=3': 'name' is no section"),
    ],
)
def test_wrong_overrides(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        override({"name": "a"}, [assignment])


def test_what_is_written_is_read_back() -> None:
    config = Config(
        name='quo"te\\ new\nline, \x7f and ü',
        rate=1e-20,
        layers=(Layer(width=8), Layer(width=4, activation="tanh")),
        tables={"user": Layer(width=3), "a b.c": Layer(width=1), "": Layer(width=2)},
        rule=Adam(1e-3, b1=0.5),
        other_rule=SGD(0.25, weight_decay=0.5),
    )
    text = to_toml(to_table(config))
    again = load(text)
    assert again == config
    assert again.rule.learning_rate == 1e-3 and again.other_rule.learning_rate == 0.25
    assert "steps" not in text


def test_the_order_of_keys_survives_where_tables_and_values_mix() -> None:
    table = {"columns": {"user": {"type": "string"}, "item": "id", "tags": {"separator": "|"}}}
    again = tomllib.loads(to_toml(table))
    assert again == table
    assert list(again["columns"]) == ["user", "item", "tags"]
