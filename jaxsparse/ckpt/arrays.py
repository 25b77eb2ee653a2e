# SPDX-License-Identifier: Apache-2.0
"""Where the arrays of tables lie in a checkpoint."""

from __future__ import annotations

import urllib.parse
from pathlib import Path

import numpy as np

from jaxsparse.ckpt.blocks import Array, ArrayReader
from jaxsparse.ckpt.errors import SaveError
from jaxsparse.ckpt.manifest import Manifest, leaf_name

TABLES = "tables"


def array_path(folder: Path, table: str, array: str) -> Path:
    """Folder of the parts of an array."""
    return folder / TABLES / urllib.parse.quote(table, safe="") / urllib.parse.quote(array, safe="")


def open_array(folder: Path, manifest: Manifest, table: str, array: str) -> ArrayReader:
    """A reader of an array of a table, ``[P, ...]`` in position order (of a table of a row store
    ``[n, ...]`` in the order of the save); needs no mesh."""
    name = leaf_name(table, array)
    shape, dtype = manifest["leaves"][name]
    return ArrayReader(array_path(folder, table, array), manifest["parts"][name], shape, dtype)


def check_finite(name: str, values: Array) -> None:
    """Raises SaveError where not: a lost state must not push a sound one out of the folder."""
    if values.dtype.kind in "iub":
        return
    bad = values.size - int(np.isfinite(values).sum())
    if bad:
        raise SaveError(f"{name}: {bad} values are not finite; the state is not saved")
