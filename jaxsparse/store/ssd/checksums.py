# SPDX-License-Identifier: Apache-2.0
"""CRC-32C of bytes and of rows: in C++ (`crc32c.cc`), or in numpy where there is no compiler.

A row's checksum is over its bytes and its location (8 bytes, little-endian): a row that lies in
another's place is damaged too.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.ops.native import library
from jaxsparse.store.ssd.native import call

POLYNOMIAL = 0x82F63B78
"""Castagnoli's, reflected (RFC 3720, appendix B.4)."""

CHUNK_BYTES = 1 << 20
"""Of rows whose table entries are looked up at once."""

PIECE = 512
"""Bytes of a row whose positions have tables of their own: 512 KB of them."""

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
Uint32s = npt.NDArray[np.uint32]


def crc32c(data: bytes | bytearray | memoryview | Bytes) -> int:
    """Of bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    array = np.frombuffer(data, np.uint8)
    if library.is_available():
        return call("jaxsparse_crc32c", array, array.size, 0)
    return int(_extend(np.zeros(1, np.uint32), array[None])[0])


def row_checksums(rows: Bytes, locations: Int64s) -> Uint32s:
    """Of rows that go to, or came from, ``locations``.

    Args:
        rows: ``[n, row_bytes]`` uint8, contiguous.
        locations: ``[n]`` int64, contiguous.

    Returns:
        ``[n]`` uint32.
    """
    if library.is_available():
        out = np.empty(len(rows), np.uint32)
        call("jaxsparse_crc32c_rows", rows, len(rows), rows.shape[1], locations, out)
        return out
    crcs = _extend(np.zeros(len(rows), np.uint32), rows)
    return _extend(crcs, locations.astype("<i8").view(np.uint8).reshape(-1, 8))


@functools.cache
def _table() -> Uint32s:
    """``[256]``: of each byte."""
    crc: Uint32s = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = (crc >> np.uint32(1)) ^ np.uint32(POLYNOMIAL) * (crc & np.uint32(1))
    return crc


@functools.cache
def _tables(size: int) -> Uint32s:
    """``[size, 256]``: of each byte by its place among ``size`` bytes, zeros after it."""
    tables = np.empty((size, 256), np.uint32)
    last = _table()
    for place in range(size - 1, -1, -1):
        tables[place] = last
        last = (last >> 8) ^ _table()[last & 255]
    return tables


def _extend(crcs: Uint32s, rows: npt.NDArray[Any]) -> Uint32s:
    """Checksums ``[n]`` of what came before, with ``rows`` [n, b] after it.

    A checksum is linear over GF(2): each byte adds what the table of its place says, and the state
    before adds as if xored to the first four bytes.
    """
    crcs = crcs.copy()
    step = max(1, CHUNK_BYTES // PIECE)
    for begin in range(0, rows.shape[1], PIECE):
        piece = rows[:, begin : begin + PIECE]
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            crcs[part] = _extend_piece(crcs[part], piece[part])
    return crcs


def _extend_piece(crcs: Uint32s, rows: npt.NDArray[Any]) -> Uint32s:
    size = rows.shape[1]
    state = ~crcs
    head = min(4, size)
    mixed = rows.copy()
    mixed[:, :head] ^= state.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :head]
    places = np.arange(size, dtype=np.int32) * 256
    found: Uint32s = np.bitwise_xor.reduce(_tables(size).ravel()[places + mixed], axis=1)
    if size < 4:  # the rest of the state moves down
        found = found ^ (state >> np.uint32(8 * size))
    return ~found
