# SPDX-License-Identifier: Apache-2.0
"""Types of configuration: classes that a table's ``kind`` chooses from, and types in words."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union


@dataclasses.dataclass(frozen=True, eq=False)
class OneOf:
    """Classes a table's ``kind`` chooses from."""

    classes: Mapping[str, type[Any]]
    """By value of ``kind``."""

    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Types of fields in TOML where they are not what the classes declare."""

    def holds(self, value: object) -> bool:
        """Whether the value is of one of the classes."""
        return type(value) in self.classes.values()

    def hints_of(self, cls: Any) -> dict[str, Any]:
        """Types of the fields of a class."""
        return {**typing.get_type_hints(cls, include_extras=True), **self.fields}

    def with_fields(self, **fields: Any) -> OneOf:
        """The same with other types for some fields, whatever the class."""
        return dataclasses.replace(self, fields=fields)

    def kind_of(self, value: object) -> str:
        """The ``kind`` that makes values of this class."""
        return next(kind for kind, cls in self.classes.items() if type(value) is cls)


def one_of(**classes: type[Any]) -> OneOf:
    """Marks a field, by ``Annotated``, whose table has a key ``kind``."""
    return OneOf(classes)


def chosen_by(hint: Any) -> OneOf | None:
    """The classes that a field of this type chooses from, if it does."""
    notes = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    return next((note for note in notes if isinstance(note, OneOf)), None)


_DESCRIPTIONS: dict[Any, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
}


def describe(hint: Any) -> str:
    """A type in words; empty for what TOML cannot hold."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _DESCRIPTIONS:
        return _DESCRIPTIONS[hint]
    if origin is Annotated or origin is dict or dataclasses.is_dataclass(hint):
        return "a table"
    if is_list(origin):
        return f"a list, each item {describe(args[0])}"
    if origin is Literal:
        return f"one of {listed(args)}"
    if origin in (Union, types.UnionType):
        return " or ".join(filter(None, map(describe, args)))
    return ""


def is_list(origin: Any) -> bool:
    """Whether a type of this origin is a list in TOML, all items of one type."""
    return origin in (tuple, Sequence)


def kind_of_toml(value: object) -> str:
    """What TOML calls a value."""
    if isinstance(value, bool):
        return "a boolean"
    names = {str: "a string", int: "an integer", float: "a number", list: "a list", dict: "a table"}
    return names.get(type(value), type(value).__name__)


def listed(names: Iterable[object]) -> str:
    """Names in a message."""
    return ", ".join(map(str, names)) or "none"


def kind_meant(chosen: OneOf, value: object) -> str:
    """A hint where a value is nearly the name of a class."""
    near = difflib.get_close_matches(str(value), chosen.classes, 1)
    return f'; write {{ kind = "{near[0]}" }}' if near else ""


def meant(name: object, known: Iterable[object]) -> str:
    """A hint where a name is nearly a known one."""
    near = difflib.get_close_matches(str(name), list(map(str, known)), 1, cutoff=0.6)
    return f", did you mean {near[0]!r}?" if near else ""
