# SPDX-License-Identifier: Apache-2.0
"""Which process of a job owns a key: fixed for all time, as files are written by it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jaxsparse.fingerprint import mix64

SALT = 0x6F776E6572206F66
"""Keys are turned by it before they are hashed: the bits that choose an owner say nothing of those
that a Bloom filter or the key index of one owner chooses by."""


def owner_of(words: npt.NDArray[np.uint64], num_processes: int) -> npt.NDArray[np.int32]:
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
