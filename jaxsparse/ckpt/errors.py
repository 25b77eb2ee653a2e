# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with checkpoints."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that is not there, is not finished, is broken, or does not fit the state."""


class DamagedError(CheckpointError):
    """A checkpoint with a file that is missing, cut or changed."""


class SaveError(RuntimeError):
    """A save that failed; every older save is as it was."""
