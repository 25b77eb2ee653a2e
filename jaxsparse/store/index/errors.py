# SPDX-License-Identifier: Apache-2.0
"""What a key index refuses."""

from __future__ import annotations


class IndexFullError(ValueError):
    """More keys than the index may hold; nothing was inserted."""

    def __init__(self, need: int, have: int, live: int) -> None:
        super().__init__(
            f"a key index of capacity {have} holds {live} keys and would hold {need} with the new "
            "ones of this batch; remove rows first, or give it a larger capacity"
        )
        self.need = need
        """Keys that there would be."""
        self.have = have
        """Keys that there may be."""
