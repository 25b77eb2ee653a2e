# SPDX-License-Identifier: Apache-2.0
"""Numbers of up to eight hexadecimal digits out of text, a column at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]

DIGITS = 8
"""Most digits of a number."""

BLOCK = 8192
"""Numbers parsed at a time: 64 KiB arrays, which malloc reuses and the cache holds."""

_LOW = np.uint64(0x0F0F0F0F0F0F0F0F)
_ONES = np.uint64(0x0101010101010101)


def _every(byte: int) -> np.uint64:
    return np.uint64(byte * 0x0101010101010101)


def parse_hex(text: Bytes, starts: Int64s, lengths: Int64s) -> Int64s | None:
    """Values of cells of text.

    Args:
        text: ASCII bytes of all cells, one after another from ``starts[0]`` on.
        starts: ``[n]`` where each cell begins.
        lengths: ``[n]`` its digits, 1 to 8.

    Returns:
        ``[n]`` int64 in 0..2**32 - 1; None if any byte is no digit or a cell is longer.

    >>> cells = np.frombuffer(b"68fd1e640A", np.uint8)
    >>> [hex(value) for value in parse_hex(cells, np.array([0, 8]), np.array([8, 2]))]
    ['0x68fd1e64', '0xa']
    """
    if not len(starts):
        return np.zeros(0, np.int64)
    if lengths.max() > DIGITS:
        return None
    if lengths.min() == DIGITS:
        first = int(starts[0])
        chars = text[first : first + DIGITS * len(starts)]
    else:
        chars = _zero_filled(text, starts, lengths)
    values = np.empty(len(starts), np.int64)
    for begin in range(0, len(starts), BLOCK):
        some = chars[DIGITS * begin : DIGITS * (begin + BLOCK)]
        found = _parse_words(some)
        if found is None:
            # Capitals are rare; `_parse_words` knows small letters only.
            capitals = (some >= ord("A")) & (some <= ord("F"))
            found = _parse_words(np.where(capitals, some | 0x20, some).astype(np.uint8))
        if found is None:
            return None
        values[begin : begin + BLOCK] = found
    return values


def _zero_filled(text: Bytes, starts: Int64s, lengths: Int64s) -> Bytes:
    chars = np.full((len(starts), DIGITS), ord("0"), np.uint8)
    for length in range(1, DIGITS + 1):
        rows = np.flatnonzero(lengths == length)
        chars[rows, DIGITS - length :] = text[starts[rows, None] + np.arange(length)]
    return chars.reshape(-1)


def _parse_words(chars: Bytes) -> Int64s | None:
    """Eight digits a word, the first in the lowest byte; all bytes of a word at once."""
    words = np.frombuffer(chars.tobytes(), "<u8")
    # '0'..'9' end in 0..9 and 'a'..'f' in 1..6, the latter with bit 6 set.
    digits: npt.NDArray[Any] = (words & _LOW) + ((words >> np.uint64(6)) & _ONES) * np.uint64(9)
    letters = ((digits + _every(6)) >> np.uint64(4)) & _ONES
    # Each must be a digit, and written back be what it was.
    written = digits + _every(0x30) + letters * np.uint64(0x27)
    if ((written ^ words) | (digits & _every(0xF0))).any():
        return None
    pairs = ((digits << np.uint64(4)) | (digits >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    quads = ((pairs << np.uint64(8)) | (pairs >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    whole = ((quads << np.uint64(16)) | (quads >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    return whole.view(np.int64)
