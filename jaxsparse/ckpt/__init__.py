# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a train state on disk, independent of the mesh it was trained on."""

from jaxsparse.ckpt.checkpoint import save_state, state_leaves
from jaxsparse.ckpt.errors import CheckpointError, SaveError
from jaxsparse.ckpt.loading import restore_state
from jaxsparse.ckpt.manager import CheckpointManager, Restored

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "Restored",
    "SaveError",
    "restore_state",
    "save_state",
    "state_leaves",
]
