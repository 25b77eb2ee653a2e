# SPDX-License-Identifier: Apache-2.0
"""The index in C++ (`index.cc`, `restore.cc`): the same rows as `reference`.

ctypes lets other Python threads run meanwhile; a lock in C++ keeps searches, which may be many at
once, apart from changes.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsparse.ops.native import library
from jaxsparse.store.index.arguments import Int32s, UInt64s
from jaxsparse.store.index.errors import IndexFullError

DONE, NO_MEMORY = -1, -2
"""What functions return where it is no count and no position; as in index.cc."""

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS: dict[str, tuple[Any, list[Any]]] = {
    "new": (_POINTER, []),
    "free": (None, [_POINTER]),
    "sizes": (None, [_POINTER, _POINTER]),
    "find": (None, [_POINTER, _POINTER, _NUMBER, _POINTER]),
    "insert": (_NUMBER, [_POINTER, _POINTER, _NUMBER, _NUMBER, _POINTER]),
    "remove": (_NUMBER, [_POINTER, _POINTER, _NUMBER]),
    "keys_of": (_NUMBER, [_POINTER, _POINTER, _NUMBER, _POINTER]),
    "save": (_NUMBER, [_POINTER, _NUMBER, _NUMBER, _POINTER, _POINTER]),
    "restore": (_NUMBER, [_POINTER, _POINTER, _NUMBER, _POINTER, _NUMBER]),
    "distinct_rows": (_NUMBER, [_POINTER, _NUMBER, *[_POINTER] * 4]),
}


@functools.cache
def function(name: str) -> Any:
    """A function of the library, its arguments declared."""
    found = getattr(library.load(), f"jaxsparse_index_{name}")
    found.restype, found.argtypes = _ARGUMENTS[name]
    return found


def address(array: npt.NDArray[Any]) -> int:
    """Of the first entry."""
    return int(array.__array_interface__["data"][0])


class Index:
    """See `jaxsparse.store.index.KeyIndex`; keys are uint64, rows int32, both contiguous."""

    def __init__(self) -> None:
        self._handle = function("new")()
        if self._handle is None:
            raise MemoryError("no memory for a key index")
        weakref.finalize(self, function("free"), self._handle)

    def _sizes(self) -> npt.NDArray[np.int64]:
        sizes = np.empty(4, np.int64)
        function("sizes")(self._handle, address(sizes))
        return sizes

    def sizes(self) -> tuple[int, int, int]:
        """Live keys, rows ever handed out, bytes."""
        live, high_water, _, num_bytes = self._sizes().tolist()
        return live, high_water, num_bytes

    def find(self, keys: UInt64s) -> Int32s:
        """Rows of keys, -1 where absent."""
        rows = np.empty(keys.size, np.int32)
        function("find")(self._handle, address(keys), keys.size, address(rows))
        return rows

    def insert(self, keys: UInt64s, capacity: int) -> Int32s:
        """Rows of keys; absent ones are given rows in the order of first occurrence."""
        rows = np.empty(keys.size, np.int32)
        need = _checked(
            function("insert")(self._handle, address(keys), keys.size, capacity, address(rows))
        )
        if need is not None:
            raise IndexFullError(need, capacity, self.sizes()[0])
        return rows

    def remove(self, rows: Int32s) -> int | None:
        """Frees rows; or the position of the first that is not live, or not any more."""
        return _checked(function("remove")(self._handle, address(rows), rows.size))

    def keys_of(self, rows: Int32s) -> UInt64s | int:
        """Keys of rows; or the position of the first that is not live."""
        keys = np.empty(rows.size, np.uint64)
        wrong = _checked(function("keys_of")(self._handle, address(rows), rows.size, address(keys)))
        return keys if wrong is None else wrong

    def arrays(self) -> tuple[UInt64s, Int32s]:
        """Key by row (0 where freed), and the freed rows; the last is given first."""
        while True:  # until no other thread has changed the index between the two calls
            _, num_rows, num_free, _ = self._sizes().tolist()
            keys, free = np.empty(num_rows, np.uint64), np.empty(num_free, np.int32)
            done = function("save")(self._handle, num_rows, num_free, address(keys), address(free))
            if done == DONE:
                return keys, free

    def restore(self, keys: UInt64s, free: Int32s) -> int | None:
        """Fills a new index; or a row whose key another row has too.

        ``free`` holds different rows of ``keys``.
        """
        return _checked(
            function("restore")(self._handle, address(keys), keys.size, address(free), free.size)
        )


def _checked(status: int) -> int | None:
    if status == NO_MEMORY:
        raise MemoryError("no memory for more keys in a key index")
    return None if status == DONE else status
