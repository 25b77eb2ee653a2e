# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that load on any mesh. Host floor: nothing under jit imports it."""
