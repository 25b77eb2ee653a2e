# SPDX-License-Identifier: Apache-2.0
"""Grouping of codes on the host, in C++ and numpy; test_native_packing.py has whole batches."""

from __future__ import annotations

import numpy as np
import pytest

from jaxsparse.ops import packing
from jaxsparse.ops.native import library
from jaxsparse.ops.packing import DeviceIds, SlabFeature, native, reference

needs_native = pytest.mark.skipif(
    not library.is_available(), reason=f"no native library: {library.why_not()}"
)


def one_device(codes, rows_per_shard):
    """Codes of two features of one table, the second with another half of them."""
    half = len(codes) // 2
    parts = [np.array(part, np.int64) for part in (codes[:half], codes[half:])]
    features = [SlabFeature(part, 0, 1, False, None, np.arange(part.size + 1)) for part in parts]
    sizes = np.array([part.size for part in parts])
    return DeviceIds(
        features=tuple(features),
        num_devices=1,
        num_owners=1,
        rows_per_shard=rows_per_shard,
        samples=int(sizes.max()),
        num_samples=int(sizes.max()),
        cuts=np.stack([np.zeros(2, np.int64), sizes], axis=1),
        places=np.concatenate([[0], np.cumsum(sizes)])[None],
    )


def arrays_of(grouped):
    found = grouped.of(0)
    return [found.order, found.codes, found.starts, found.bounds, grouped.inverse]


@needs_native
@pytest.mark.parametrize("top", [3, 2**20, 2**31 - 1, 2**50])
@pytest.mark.parametrize("size", [0, 1, 2, 100, 3_000])
def test_both_group_alike(size, top):
    codes = np.random.default_rng(size).integers(0, top, size)
    ids = one_device(codes, top)
    for got, want in zip(
        arrays_of(native.group(ids)), arrays_of(reference.group(ids)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@needs_native
def test_codes_too_wide_for_a_word_are_left_to_numpy():
    ids = one_device(np.array([2**62, 5, 2**62, 0]), 2**62 + 1)
    assert native.group(ids) is None
    found = packing.group(ids).of(0)
    assert found.codes.tolist() == [0, 5, 2**62]
    assert found.order.tolist() == [3, 1, 0, 2]


def test_numpy_memory_can_be_read_in_place():
    for shape in [(3,), (5, 1_001)]:
        array = native.aligned_empty(shape, np.int32)
        assert native.address(array) % native.ALIGNMENT == 0
        assert (array.shape, array.dtype) == (shape, np.int32)
