# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a train state on disk, independent of the mesh it was trained on."""

from jaxsparse.ckpt.checkpoint import CheckpointError, restore_state, save_state, state_leaves

__all__ = ["CheckpointError", "restore_state", "save_state", "state_leaves"]
