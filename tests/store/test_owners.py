# SPDX-License-Identifier: Apache-2.0
"""Who owns a key never changes: files of a job are cut by it."""

from __future__ import annotations

import numpy as np
import pytest

from jaxsparse.store.owners import owner_of


def test_owners_are_fixed():
    keys = np.arange(12, dtype=np.uint64) * np.uint64(2**59)
    assert owner_of(keys, 5).tolist() == [4, 0, 3, 4, 3, 1, 2, 4, 1, 0, 4, 3]
    ends = np.array([2**64 - 1, 0], np.uint64)
    assert owner_of(ends, 2**31 - 1).tolist() == [529178575, 2135061390]
    assert owner_of(ends[:0], 3).dtype == np.int32


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_keys_are_spread_evenly(processes):
    keys = np.arange(60_000, dtype=np.uint64)
    counts = np.bincount(owner_of(keys, processes), minlength=processes)
    assert counts.size == processes
    assert np.abs(counts - 60_000 / processes).max() < 5 * (60_000 / processes) ** 0.5
