# SPDX-License-Identifier: Apache-2.0
"""Which process of a job owns a key, and has its row.

`owner_of` is fixed for all time: files are cut by it.
"""

from __future__ import annotations

import jax
import numpy as np
import numpy.typing as npt

from jaxsparse.fingerprint import mix64
from jaxsparse.store.growing import grown

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int32]

SALT = 0x6F776E6572206F66
"""Keys are turned by it before they are hashed: the bits that choose an owner say nothing of those
that a Bloom filter or the key index of one owner chooses by."""


def owner_of(words: Keys, num_processes: int) -> Rows:
    """Process ``[n]`` int32 in [0, num_processes) that owns each key.

    The high 32 bits of splitmix64 of (key xor `SALT`), times ``num_processes``, shifted right by 32
    bits: a function of the key and the number of processes alone.

    Args:
        words: ``[n]`` keys, as the 64 bits a table knows them by.
        num_processes: of the job, 1 to 2**31 - 1.

    >>> owner_of(np.arange(6, dtype=np.uint64), 2)
    array([1, 1, 0, 1, 0, 1], dtype=int32)
    """
    high = mix64(np.ascontiguousarray(words) ^ np.uint64(SALT)) >> np.uint64(32)
    return ((high * np.uint64(num_processes)) >> np.uint64(32)).astype(np.int32)


class RowOwners:
    """Which process has each row of a table: the one that owns its key, of those with places for
    the table. Owners are numbered among these."""

    def __init__(self, process_at: Rows | None) -> None:
        """Knows no row yet.

        Args:
            process_at: process by place; None where every process that there is has all rows.
        """
        self.group_at: Rows | None = None
        """Owner by place; None where there is one."""
        self.processes: Rows | None = None
        """By owner; None where every process has all rows."""
        if process_at is not None:
            self.processes, group_at = np.unique(process_at, return_inverse=True)
            if self.processes.size > 1:
                self.group_at = group_at.astype(np.int32)
        self._of = np.zeros(0, np.int32)

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return self._of.nbytes

    def of_keys(self, keys: Keys) -> Rows:
        """Owners ``[n]`` of keys."""
        if self.processes is None or self.group_at is None:
            return np.zeros(keys.size, np.int32)
        return owner_of(keys, self.processes.size)

    def note(self, rows: Rows, keys: Keys) -> None:
        """Rows ``[n]`` have been given to keys."""
        if self.group_at is not None:
            self._of = grown(self._of, int(rows.max(initial=-1)) + 1, 0)
            self._of[rows] = self.of_keys(keys)

    def of(self, rows: Rows) -> Rows:
        """Owners ``[n]`` of rows that have keys."""
        return np.zeros(rows.size, np.int32) if self.group_at is None else self._of[rows]

    def counts(self, rows: Rows) -> npt.NDArray[np.int64]:
        """By owner, how many of ``rows`` it has."""
        return np.array([rows.size]) if self.group_at is None else self._counts(self._of[rows])

    def counts_of_keys(self, keys: Keys) -> npt.NDArray[np.int64]:
        """By owner, how many of ``keys`` it has."""
        return np.array([keys.size]) if self.group_at is None else self._counts(self.of_keys(keys))

    def _counts(self, owners: Rows) -> npt.NDArray[np.int64]:
        assert self.processes is not None
        return np.bincount(owners, minlength=self.processes.size)

    def process_of(self, rows: Rows) -> Rows | None:
        """Process ``[n]`` that has each row; None where every one has all."""
        return None if self.processes is None else self.processes[self.of(rows)]

    def has(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` this process has."""
        process = self.process_of(rows)
        if process is None:
            return np.ones(rows.size, bool)
        mine: npt.NDArray[np.bool_] = process == jax.process_index()
        return mine
