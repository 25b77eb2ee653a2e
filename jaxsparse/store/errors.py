# SPDX-License-Identifier: Apache-2.0
"""What a row store refuses."""

from __future__ import annotations


class StoreFullError(ValueError):
    """A table, or its share of the devices, is too small for a batch; nothing was changed."""
