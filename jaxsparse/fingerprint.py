# SPDX-License-Identifier: Apache-2.0
"""The frozen 64-bit hash of keys, and what counts as a key.

Trained tables are addressed by this hash, so a change of one bit makes every checkpoint of a hashed
table worthless: its vectors are pinned in the tests, and `HASH_VERSION` would have to move with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from jaxsparse.key_arrays import unmasked

HASH_VERSION = 1
"""Names the meaning of `fingerprint64` and of `Hashed.rows`; to be stored beside saved tables."""

Keys = npt.ArrayLike
Uint64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]
Flat = Uint64s | list[str | bytes]
"""Parsed keys: integers as their 64 bits, or Python strings."""

MASK64 = 2**64 - 1

MIX_BLOCK = 8192
"""Keys mixed at a time: 64 KiB, within the small blocks that malloc reuses."""


def as_array(keys: Any) -> npt.NDArray[Any]:
    """Wraps ``keys`` without letting numpy guess what Python sequences mean.

    ``np.asarray([1, 2**63])`` is float64 and loses digits, ``np.asarray(["a", 1])`` turns the 1
    into text, ``np.asarray([True, 2])`` hides the bool, and a list of buffers (bytearray, pyarrow's
    strings) becomes a matrix of their bytes even with ``dtype=object``.
    """
    if hasattr(keys, "as_py"):
        keys = keys.as_py()
    if hasattr(keys, "__array__"):
        return np.asarray(unmasked("keys", keys))
    if not isinstance(keys, list | tuple):
        keys = [keys]
        return np.fromiter(keys, object, 1).reshape(())
    if not any(issubclass(kind, list | tuple | np.ndarray) for kind in set(map(type, keys))):
        return np.fromiter(keys, object, len(keys))
    rows = [as_array(row).astype(object) for row in keys]
    if len({row.shape for row in rows}) > 1:
        raise ValueError("nested lists of keys must have equal lengths; use Ragged.from_lists")
    return np.stack(rows)


def example(array: npt.NDArray[Any], flat_index: int) -> str:
    """``VALUE at position I`` (a tuple where ``array`` has several dimensions)."""
    value = array.reshape(-1)[flat_index]
    value = value.item() if isinstance(value, np.generic) else value
    if array.ndim < 2:
        return f"{value!r} at position {flat_index}"
    position = tuple(int(i) for i in np.unravel_index(flat_index, array.shape))
    return f"{value!r} at position {position}"


def _refuse(array: npt.NDArray[Any], flat_index: int) -> TypeError:
    """The error for a value that is no key."""
    value = array.reshape(-1)[flat_index]
    hint = ""
    if isinstance(value, float | np.floating):
        hint = "; floats hold integers exactly only up to 2**53: cast to int64 or uint64 on purpose"
    elif isinstance(value, bool | np.bool_):
        hint = "; cast booleans to int64 on purpose"
    elif value is None:
        hint = "; a missing key is an empty bag or the feature's padding_id"
    kind = array.dtype.name if array.dtype.kind not in "OT" else type(value).__name__
    return TypeError(
        f"keys must be integers, str or bytes, got {kind} {example(array, flat_index)}{hint}"
    )


def _first(flags: Iterable[bool]) -> int:
    return next(i for i, flag in enumerate(flags) if flag)


def _is_string(kind: type) -> bool:
    return issubclass(kind, str | bytes)


def _is_integer(kind: type) -> bool:
    return issubclass(kind, int | np.integer) and not issubclass(kind, bool)


def _parse_objects(array: npt.NDArray[Any]) -> Flat:
    """Object arrays: all integers, or all strings; anything else is refused by example."""
    values = [v.as_py() if hasattr(v, "as_py") else v for v in array.reshape(-1).tolist()]
    kinds = set(map(type, values))
    if all(map(_is_string, kinds)):
        return values
    if not all(map(_is_integer, kinds)):
        if all(_is_integer(kind) or _is_string(kind) for kind in kinds):
            index = _first(_is_string(type(v)) for v in values)
            raise TypeError(f"keys mix integers and strings: {example(array, index)} is a string")
        bad = _first(not (_is_integer(type(v)) or _is_string(type(v))) for v in values)
        raise _refuse(array, bad)
    integers = list(map(int, values))
    if min(integers) < -(2**63) or max(integers) > MASK64:
        bad = _first(not -(2**63) <= v <= MASK64 for v in integers)
        raise ValueError(f"key {example(array, bad)} does not fit 64 bits")
    return np.fromiter((v & MASK64 for v in integers), np.uint64, len(integers))


def parse_keys(keys: Any) -> tuple[npt.NDArray[Any], Flat]:
    """Returns the keys as an array, and flat: integers as their 64 bits, or Python strings."""
    array = as_array(keys)
    if array.size == 0:
        return array, np.zeros(0, np.uint64)
    if array.dtype.kind in "iu":
        # The cast sign-extends: equal values have equal bits in every dtype, and -1 is 2**64 - 1.
        return array, array.reshape(-1).astype(np.uint64)
    if array.dtype.kind in "US":
        return array, array.reshape(-1).tolist()
    if array.dtype.kind in "OT":
        return array, _parse_objects(array)
    raise _refuse(array, 0)


def mix64(x: Uint64s) -> Uint64s:
    """splitmix64's step and finalizer (Steele, Lea, Flood 2014): a bijection of 64 bits, ``[N]``.

    In blocks: whole-array temporaries cost three times as much, mostly in fresh pages.
    """
    mixed = np.empty_like(x)
    for begin in range(0, len(x), MIX_BLOCK):
        z = x[begin : begin + MIX_BLOCK] + np.uint64(0x9E3779B97F4A7C15)
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        mixed[begin : begin + MIX_BLOCK] = z
    return mixed


def utf8(text: str | bytes) -> bytes:
    """The bytes a string is hashed and compared by."""
    # surrogatepass: lone surrogates (text decoded with errors="surrogateescape") have bytes too.
    return bytes(text) if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def _hash_strings(strings: Sequence[str | bytes]) -> Uint64s:
    """xxh3_64 of the UTF-8 bytes."""
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(utf8(s)) for s in strings), np.uint64, len(strings))


def fingerprint_flat(flat: Flat) -> Uint64s:
    """`fingerprint64` of parsed keys."""
    return mix64(flat) if isinstance(flat, np.ndarray) else _hash_strings(flat)


def fingerprint64(keys: Keys) -> Uint64s:
    """The frozen 64-bit hash of keys, version `HASH_VERSION`.

    Integers of equal value hash alike in every dtype; ``np.int64(-1)`` and ``np.uint64(2**64 - 1)``
    are the same 64 bits, hence the same key. Distinct integers never share a fingerprint. A string
    hashes as its UTF-8 bytes, so ``"a"`` and ``b"a"`` are one key, and ``"1"`` is not ``1``.

    Fixed width numpy strings (``<U`` and ``|S``) have lost their trailing NULs before they get
    here: ``np.array(["a\\0"])`` holds the key ``"a"``, the list ``["a\\0"]`` and an array of dtype
    object hold ``"a\\0"``.

    Args:
        keys: array or sequence of integers, or of ``str`` or ``bytes``; any shape.

    Returns:
        uint64 in the shape of ``keys``: splitmix64 of integers, xxh3_64 of strings.

    Raises:
        TypeError: for bools, floats, None, or integers and strings in one array.
        ValueError: for a Python int that needs more than 64 bits, or a masked entry.

    >>> fingerprint64([0, 1])
    array([16294208416658607535, 10451216379200822465], dtype=uint64)
    """
    array, flat = parse_keys(keys)
    return fingerprint_flat(flat).reshape(array.shape)


class ExactIndex:
    """Fingerprint to position by open addressing; probed for all keys at once.

    A binary search in 10^6 sorted fingerprints misses the cache some twenty times a key; here it is
    once or twice, because fingerprints are uniform and the table is at most half full.
    """

    def __init__(self, fingerprints: Uint64s) -> None:
        """Inserts distinct ``fingerprints`` ``[E]``; their positions are 0..E - 1."""
        bits = max(1, (2 * len(fingerprints) - 1).bit_length())
        self.shift = np.uint64(64 - bits)
        self.last_slot = np.int64(2**bits - 1)
        self.position = np.full(2**bits, -1, np.int64)
        self.fingerprint = np.zeros(2**bits, np.uint64)
        pending = np.arange(len(fingerprints))
        slots = self._home(fingerprints)
        while len(pending):
            free = self.position[slots] < 0
            # Of several keys at one free slot the last writer stays, the others move on.
            self.position[slots[free]] = pending[free]
            lost = self.position[slots] != pending
            pending, slots = pending[lost], (slots[lost] + 1) & self.last_slot
        used = self.position >= 0
        self.fingerprint[used] = fingerprints[self.position[used]]

    def _home(self, fingerprints: Uint64s) -> Int64s:
        return (fingerprints >> self.shift).astype(np.int64)

    def find(self, fingerprints: Uint64s) -> Int64s:
        """Positions ``[N]`` of fingerprints ``[N]``, -1 where there is none."""
        found = np.full(len(fingerprints), -1, np.int64)
        pending = np.arange(len(fingerprints))
        slots = self._home(fingerprints)
        while len(pending):
            position = self.position[slots]
            match = self.fingerprint[slots] == fingerprints[pending]
            found[pending[match]] = position[match]
            go_on = (position >= 0) & ~match
            pending, slots = pending[go_on], (slots[go_on] + 1) & self.last_slot
        return found
