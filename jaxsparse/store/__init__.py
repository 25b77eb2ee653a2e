# SPDX-License-Identifier: Apache-2.0
"""Rows beyond the device: key index, memory and disk tiers. ``embedding`` never imports it."""

from jaxsparse.store.census import Census, draw_tiers
from jaxsparse.store.errors import StoreFullError
from jaxsparse.store.passes import Pass
from jaxsparse.store.reader import RowReader
from jaxsparse.store.row_store import RowStore
from jaxsparse.store.ssd import StoreError

__all__ = ["Census", "Pass", "RowReader", "RowStore", "StoreError", "StoreFullError", "draw_tiers"]
