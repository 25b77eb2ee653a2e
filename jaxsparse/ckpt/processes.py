# SPDX-License-Identifier: Apache-2.0
"""Several processes that save together: all succeed, or all raise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxsparse.ckpt.errors import SaveError
from jaxsparse.processes import gather, is_shared


def is_writer(mesh: Mesh) -> bool:
    """Whether this process writes what is no table, and gives folders their names."""
    return not is_shared(mesh) or jax.process_index() == mesh.devices.flat[0].process_index


@contextlib.contextmanager
def agree(mesh: Mesh, path: Path) -> Iterator[None]:
    """Ends the block on all processes of a mesh together, with an error if any of them had one.

    Raises:
        SaveError: the block failed here or elsewhere; the text names ``path`` and the reason.
    """
    failure: Exception | None = None
    try:
        yield
    except (OSError, ValueError, SaveError) as error:  # tensorstore raises ValueError
        failure = error
    told = f"{path}: cannot be saved: {_reason(failure)}" if failure else ""
    failed = [text for text in gather(mesh, told) if text]
    if failed:
        raise SaveError(f"{failed[0]}; older saves are as they were") from failure


def _reason(error: Exception) -> str:
    text = str(error).split(" [")[0]
    if "RESOURCE_EXHAUSTED" in text or "No space left" in text or "Disk quota" in text:
        return f"no space is left on the device ({text})"
    return text or type(error).__name__
