# SPDX-License-Identifier: Apache-2.0
"""TOML to frozen dataclasses and back, every key and type checked; `config_text` writes TOML.

A dataclass is a table. A field whose table chooses between classes is declared with `one_of`::

    optimizer: Annotated[Any, one_of(adam=Adam, sgd=SGD)]       # kind = "adam", then its fields

Anything wrong is a `ConfigError` that names the file, the key, what was expected and what came.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

import numpy as np

from jaxsparse.config_types import (
    OneOf,
    chosen_by,
    describe,
    is_list,
    kind_meant,
    kind_of_toml,
    listed,
    meant,
    one_of,
)

__all__ = ["ConfigError", "OneOf", "one_of", "override", "parse", "read_toml", "to_table"]

T = TypeVar("T")
Table = dict[str, Any]

_TOO_MUCH = (ValueError, RecursionError)
"""What tomllib raises beside its own error: integers of too many digits, values nested too deep."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the text says where and why."""


def read_toml(path: str | Path) -> Table:
    """Reads a file.

    Raises:
        ConfigError: there is no such file, it cannot be read, or it is not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except _TOO_MUCH as error:  # not TOML, not UTF-8, or too much of it
        raise ConfigError(f"{path}: not a TOML file: {error}") from error


def override(table: Mapping[str, Any], assignments: Iterable[str]) -> Table:
    """A copy of ``table`` with ``section.key=value`` assignments made.

    A value that is not TOML (``../data``) is a string.

    >>> override({"train": {"epochs": 1}}, ["train.epochs=2", "data.dir=../x", "model.top=[8]"])
    {'train': {'epochs': 2}, 'data': {'dir': '../x'}, 'model': {'top': [8]}}
    """
    changed = copy.deepcopy(dict(table))
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        *sections, key = parts = name.strip().split(".")
        if not equals or not all(parts):
            raise ConfigError(f"--set {_short(assignment)!r}: expected section.key=value")
        inner = changed
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--set {_short(assignment)!r}: {section!r} is no section")
        try:
            inner[key] = _parse_value(text.strip())
        except _TOO_MUCH as error:
            raise ConfigError(f"--set {_short(assignment)!r}: cannot be read: {error}") from error
    return changed


def _parse_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"


def parse(cls: type[T], table: Mapping[str, Any], source: str) -> T:
    """Makes a dataclass of a table.

    Args:
        cls: a dataclass; its fields may be str, int, float, bool, Literal, tuple[X, ...],
            dict[str, X], dataclasses, X | None, or `one_of` several classes.
        table: as `read_toml` returns it.
        source: named in errors, such as the file.

    Raises:
        ConfigError: an unknown or missing key, or a value of a wrong type or range.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Model:
    ...     top: tuple[int, ...] = (64,)
    >>> parse(Model, {"top": [8, 4]}, "run.toml")
    Model(top=(8, 4))
    """
    result: T = _dataclass(cls, table, _Where(source))
    return result


@dataclasses.dataclass(frozen=True)
class _Where:
    source: str
    path: tuple[str, ...] = ()

    def __truediv__(self, key: str | int) -> _Where:
        return _Where(self.source, (*self.path, str(key)))

    def error(self, text: str) -> ConfigError:
        name = ".".join(self.path)
        return ConfigError(f"{self.source}: {name}: {text}" if name else f"{self.source}: {text}")

    def expected(self, what: str, got: object, hint: str = "") -> ConfigError:
        return self.error(f"expected {what}, got {got!r} ({kind_of_toml(got)}){hint}")


def _value(hint: Any, value: Any, where: _Where) -> Any:
    """A value of the type ``hint``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        chosen = chosen_by(hint)
        return _chosen(chosen, value, where) if chosen else _value(args[0], value, where)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _union(args, value, where)
    if origin is Literal:
        if value not in args:
            raise where.error(f"expected one of {listed(args)}{meant(value, args)}, got {value!r}")
        return value
    if is_list(origin):
        if not isinstance(value, list):
            raise where.expected(describe(hint), value)
        return tuple(_value(args[0], item, where / i) for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise where.expected(describe(hint), value)
        return {key: _value(args[1], item, where / key) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, value, where)
    return _scalar(hint, value, where)


def _scalar(hint: Any, value: Any, where: _Where) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    # bool is an int in Python, but 1 is not true in TOML.
    if type(value) is not hint:
        raise where.expected(describe(hint), value)
    if hint is float and not math.isfinite(value):
        raise where.expected("a finite number", value)
    return value


def _union(args: Sequence[Any], value: Any, where: _Where) -> Any:
    """The alternative that takes the value; callables cannot be written in TOML."""
    options = [a for a in args if a is not type(None) and describe(a)]
    tables = [a for a in options if describe(a) == "a table"]
    if isinstance(value, Mapping) and len(tables) == 1:
        options = tables  # its own error says more than "expected a string or a table"
    if len(options) == 1:
        return _value(options[0], value, where)
    if float in options and isinstance(value, float):
        return _scalar(float, value, where)  # "expected a number, got nan (a number)" says nothing
    for option in options:
        try:
            return _value(option, value, where)
        except ConfigError:
            pass
    table = next((chosen for option in options if (chosen := chosen_by(option))), None)
    hint = kind_meant(table, value) if table else ""
    raise where.expected(" or ".join(map(describe, options)), value, hint)


def _chosen(chosen: OneOf, value: Any, where: _Where) -> Any:
    if not isinstance(value, Mapping):
        raise where.expected("a table with a key 'kind'", value, kind_meant(chosen, value))
    rest = dict(value)
    if "kind" not in rest:
        raise where.error(f"needs a key 'kind', one of {listed(chosen.classes)}")
    kind = _value(Literal[tuple(chosen.classes)], rest.pop("kind"), where / "kind")
    cls = chosen.classes[kind]
    return _dataclass(cls, rest, where, chosen.hints_of(cls))


def _dataclass(cls: Any, value: Any, where: _Where, hints: Mapping[str, Any] | None = None) -> Any:
    if not isinstance(value, Mapping):
        raise where.expected("a table", value)
    hints = hints or typing.get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in value:
        if key not in fields:
            near = meant(key, fields)
            raise (where / key).error(f"unknown key{near}; known: {listed(fields)}")
    for name, field in fields.items():
        no_default = field.default is field.default_factory is dataclasses.MISSING
        if no_default and name not in value:
            raise (where / name).error(f"is missing, expected {describe(hints[name])}")
    given = {key: _value(hints[key], item, where / key) for key, item in value.items()}
    try:
        return cls(**given)
    except (ValueError, TypeError) as error:
        raise where.error(str(error)) from error


def to_table(config: Any) -> Table:
    """The table that `parse` would make ``config`` of; None is left out."""
    return _table(config, typing.get_type_hints(type(config), include_extras=True))


def _table(config: Any, hints: Mapping[str, Any]) -> Table:
    return {
        field.name: _plain(hints[field.name], value)
        for field in dataclasses.fields(config)
        if field.init and (value := getattr(config, field.name)) is not None
    }


def _plain(hint: Any, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, bytes):
        return value.decode()
    if typing.get_origin(hint) in (Union, types.UnionType):
        options = typing.get_args(hint)
        held = (option for option in options if (c := chosen_by(option)) and c.holds(value))
        # Of others only X | None holds anything that needs its declaration.
        hint = next(held, options[0])
    args, chosen = typing.get_args(hint), chosen_by(hint)
    if chosen is not None:
        return {"kind": chosen.kind_of(value), **_table(value, chosen.hints_of(type(value)))}
    if typing.get_origin(hint) is Annotated:
        return value
    if isinstance(value, tuple | list):
        return [_plain(args[0] if args else Any, item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(args[1], item) for key, item in value.items()}
    return to_table(value) if dataclasses.is_dataclass(value) else value
