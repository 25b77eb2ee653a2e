# SPDX-License-Identifier: Apache-2.0
"""Rows for tests of the store on disks, and a checksum written from its definition."""

from __future__ import annotations

import hashlib
import pathlib
from typing import Any

import numpy as np

from jaxsparse.ops.native import library
from jaxsparse.store.ssd import SegmentStore

ROW_BYTES = 44
SEGMENT_BYTES = 16 << 10

NATIVE = library.is_available()
IMPLEMENTATIONS = ("io_uring", "pread", "python")


def open_store(folder: pathlib.Path, folders: int = 2, **options: Any) -> SegmentStore:
    paths = [folder / f"disk{number}" for number in range(folders)]
    fixed = {"table": "item", "row_bytes": ROW_BYTES, "segment_bytes": SEGMENT_BYTES}
    return SegmentStore(paths, **{**fixed, **options})


def row(key: int, version: int) -> bytes:
    """That no other key and no other version has."""
    return hashlib.shake_128(f"{key}.{version}".encode()).digest(ROW_BYTES)


def rows_of(versions: dict[int, int]) -> np.ndarray:
    data = b"".join(row(key, version) for key, version in versions.items())
    return np.frombuffer(data, np.uint8).reshape(-1, ROW_BYTES)


def keys_of(versions: dict[int, int]) -> np.ndarray:
    return np.array(list(versions), np.uint64)


def random_rows(rng: np.random.Generator, count: int, size: int = ROW_BYTES) -> np.ndarray:
    return rng.integers(0, 256, (count, size), dtype=np.uint8)


def crc32c_by_bits(data: bytes) -> int:
    """Division of the message by the polynomial 0x1EDC6F41, a bit at a time."""
    state = 0xFFFFFFFF
    for byte in data:
        for bit in range(8):
            top = (state ^ (byte >> bit)) & 1
            state = (state >> 1) ^ (int(f"{0x1EDC6F41:032b}"[::-1], 2) if top else 0)
    return state ^ 0xFFFFFFFF
