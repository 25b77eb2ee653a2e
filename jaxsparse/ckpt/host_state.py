# SPDX-License-Identifier: Apache-2.0
"""What a run has to remember on the host: nested dicts and lists of plain values and arrays."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxsparse.ckpt.errors import DamagedError

VALUES = "run.json"
ARRAYS = "run.npz"
MARK = "array of run.npz"
NUMBER = "number"


class HostState(NamedTuple):
    """A value taken apart; nothing that happens to it later changes this."""

    text: str
    arrays: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Writes it for `read_host_state`."""
        (folder / VALUES).write_text(self.text, encoding="utf-8")
        with open(folder / ARRAYS, "wb") as file:
            np.savez(file, **self.arrays)


def pack_host_state(value: Any) -> HostState:
    """Takes apart a value that `read_host_state` gives back, bit for bit.

    Args:
        value: of dicts with string keys, lists, tuples (read as lists), str, bool, int, float,
            None and numpy arrays without objects.

    Raises:
        TypeError: it holds anything else; the text says where.
    """
    arrays: dict[str, Any] = {}
    plain = _to_plain(value, "run", arrays)
    return HostState(json.dumps(plain, allow_nan=False), arrays)


def read_host_state(folder: Path) -> Any:
    """Reads what `HostState.write` wrote.

    Raises:
        DamagedError: it is missing, cut or damaged.
    """
    try:
        plain = json.loads((folder / VALUES).read_text(encoding="utf-8"))
        with np.load(folder / ARRAYS, allow_pickle=False) as file:
            return _from_plain(plain, dict(file))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DamagedError(
            f"{folder}: {VALUES} or {ARRAYS} cannot be read, is it damaged? ({error})"
        ) from error


def _to_plain(value: Any, where: str, arrays: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key in (MARK, NUMBER):
                raise TypeError(f"{where}: a key must be a plain str, got {key!r}")
        return {key: _to_plain(inner, f"{where}.{key}", arrays) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(inner, f"{where}[{i}]", arrays) for i, inner in enumerate(value)]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        name = f"a{len(arrays)}"
        arrays[name] = value.copy()
        return {MARK: name}
    if isinstance(value, np.bool_ | np.integer | np.floating):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return {NUMBER: str(value)}  # JSON has none for it
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"{where}: cannot be saved: {type(value).__name__} {value!r}")


def _from_plain(value: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_from_plain(inner, arrays) for inner in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {MARK}:
        return arrays[value[MARK]]
    if set(value) == {NUMBER}:
        return float(value[NUMBER])
    return {key: _from_plain(inner, arrays) for key, inner in value.items()}
