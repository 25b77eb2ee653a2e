# SPDX-License-Identifier: Apache-2.0
"""Writes TOML, which the standard library only reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def to_toml(table: Mapping[str, Any]) -> str:
    """TOML text of nested tables, keys in their order, which may mean something.

    TOML has a table's plain values before its sub-tables: where that would change the order, the
    sub-tables are written inline. So are tables within lists.

    >>> print(to_toml({"name": "a", "train": {"epochs": 1, "top": [8, 4]}}), end="")
    name = "a"
    <BLANKLINE>
    [train]
    epochs = 1
    top = [8, 4]
    """
    return "\n".join(_sections(table, ())).lstrip("\n") + "\n"


def _sections(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    is_table = [isinstance(value, Mapping) for value in table.values()]
    in_order = is_table == sorted(is_table)
    inner = {k: v for k, v in table.items() if in_order and isinstance(v, Mapping)}
    own = [f"{_key(k)} = {_toml(v)}" for k, v in table.items() if k not in inner]
    lines = [f"\n[{'.'.join(map(_key, path))}]", *own] if path and (own or not inner) else own
    for key, value in inner.items():
        lines += _sections(value, (*path, key))
    return lines


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "_").replace("_", "a").isalnum()
    return key if bare else _quoted(key)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
