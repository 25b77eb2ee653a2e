# SPDX-License-Identifier: Apache-2.0
"""The programs at the boundary: in place, without memory or time that grows with the table."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.store.row_format import columns, num_words, read_column, write_column
from jaxsparse.store.swap import block_size, make_rows, put_rows, take_rows
from tests.field_cases.layers import mesh_of
from tests.store.stores import dynamic

DIM, ROWS = 8, 128


def programs(capacity, devices):
    """Compiled: rows out, rows in, rows made; and the bytes of slab and slots on a device."""
    rule = js.Adam(0.1, per_row_count=True)
    spec = dynamic("t", capacity, DIM, rule)
    emb = js.EmbeddingCollection([js.FeatureSpec("f", spec)], mesh=mesh_of(devices))
    state = jax.eval_shape(lambda: emb.init(jax.random.key(0)))
    arrays = state.slabs[0], state.slots[0]
    words = num_words(emb.layout.slabs[0])

    def block(dtype, *more):
        return jax.ShapeDtypeStruct((devices * ROWS, *more), dtype)

    rows = block(np.int32)
    numbers = block(np.uint32), block(np.uint32), block(np.int32)
    key = jax.ShapeDtypeStruct((2,), np.uint32)
    lowered = (
        take_rows.lower(emb, 0, *arrays, rows),
        put_rows.lower(emb, 0, *arrays, rows, block(np.uint32, words)),
        make_rows.lower(emb, 0, *arrays, key, rows, *numbers),
    )
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays)) // devices
    return [program.compile() for program in lowered], held


@pytest.mark.parametrize("devices", [1, 4])
def test_rows_are_exchanged_in_place(devices):
    small, large = programs(10_000, devices), programs(100_000, devices)
    for few, many in zip(small[0], large[0], strict=True):
        memory = [program.memory_analysis() for program in (few, many)]
        assert memory[0].temp_size_in_bytes == memory[1].temp_size_in_bytes
        assert "all-" not in many.as_text()
    for program in large[0][1:]:
        assert program.memory_analysis().alias_size_in_bytes >= large[1]


def test_words_hold_all_arrays_of_a_row():
    rule = js.Adam(0.1, per_row_count=True)
    emb = js.EmbeddingCollection([js.FeatureSpec("f", dynamic("t", 9, 3, rule))], mesh=mesh_of(1))
    slab = emb.layout.slabs[0]
    found = [(c.name, c.start, c.width, c.is_scalar, c.dtype.name) for c in columns(slab)]
    assert found == [
        ("", 0, 3, False, "float32"),
        ("count", 3, 1, True, "int32"),
        ("m", 4, 3, False, "float32"),
        ("v", 7, 3, False, "float32"),
    ]
    words = np.zeros((2, 10), np.uint32)
    write_column(slab, words, "count", np.array([7, -1], np.int32))
    write_column(slab, words, "m", np.float32([[1, -0.0, np.nan], [4, 5, 6]]))
    assert read_column(slab, words, "count").tolist() == [7, -1]
    bits = read_column(slab, words, "m").view(np.uint32)
    assert bits.tolist() == np.float32([[1, -0.0, np.nan], [4, 5, 6]]).view(np.uint32).tolist()
    assert not words[:, [0, 1, 2, 7, 8, 9]].any()


def test_block_sizes_are_few():
    assert [block_size(n) for n in (0, 1, 64, 65, 1000, 1024)] == [0, 64, 64, 128, 1024, 1024]
