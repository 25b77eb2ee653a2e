# SPDX-License-Identifier: Apache-2.0
"""Rows beside the ones that are asked for are neither read nor moved (I06, I07, I09)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from tests.combinations import make_mesh
from tests.small_trainers import table

SLOW = pytest.mark.slow

WIDTHS = (1, 3, 5, 8, 12, 96, 100, 129)


@pytest.mark.parametrize(
    ("mesh_name", "placement"),
    [
        ("1", "sharded"),
        pytest.param("4", "sharded", marks=SLOW),
        pytest.param("1", "replicated", marks=SLOW),
        pytest.param("4", "replicated", marks=SLOW),
    ],
)
def test_neighbours_of_any_width_are_never_read(mesh_name, placement):
    """I06, I07: masked or blocked loads took in the next row, or what lies behind the last one."""
    num_rows, keys = 101, np.array([0, 100, 50, 50, 7, 100, 99])
    # Initial rows are not looked at: those of eight widths take long to compile.
    options = {"placement": placement, "initializer": js.constant(0.0)}
    tables = [table(f"t{dim}", num_rows, dim, js.Adagrad(0.5), **options) for dim in WIDTHS]
    emb = js.EmbeddingCollection(
        [js.FeatureSpec(t.name, t) for t in tables], mesh=make_mesh(mesh_name)
    )
    rng = np.random.default_rng(0)
    state = emb.init(jax.random.key(0))
    # All is NaN, slots and rows without an id too, but for the rows of the keys.
    state = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.ndim else x, state)
    touched = np.unique(keys)
    start = {t.name: rng.random((touched.size, t.embedding_dim), np.float32) for t in tables}
    for name, rows in start.items():
        state = emb.write(state, name, touched, rows)
    state = dataclasses.replace(state, slots=touched_slots(emb, state, touched))

    acts, residuals = emb.lookup(state, emb.pack({t.name: keys for t in tables}))
    grads = {}
    for name, rows in start.items():
        got = np.asarray(acts[name])[: keys.size]
        np.testing.assert_array_equal(got, rows[np.searchsorted(touched, keys)])
        grads[name] = jnp.ones_like(acts[name])
    state = emb.update(state, residuals, grads, step=0)
    count = np.bincount(np.searchsorted(touched, keys))[:, None].astype(np.float32)
    others = np.setdiff1d(np.arange(num_rows), touched)
    for name, rows in start.items():
        accumulator = 0.25 + count**2
        want = rows - 0.5 * count / np.sqrt(accumulator)
        np.testing.assert_allclose(emb.read(state, name, touched), want, rtol=1e-5, atol=1e-6)
        slots = emb.read_slots(state, name, touched)["accumulator"]
        np.testing.assert_allclose(slots, np.broadcast_to(accumulator, slots.shape), rtol=1e-6)
        assert np.isnan(emb.read(state, name, others)).all()
        assert np.isnan(emb.read_slots(state, name, others)["accumulator"]).all()


def touched_slots(emb, state, keys):
    """Slots that are 0.25 where the slab is not NaN."""
    return tuple(
        {name: jnp.where(jnp.isnan(slab), jnp.nan, 0.25) for name in slots}
        for slab, slots in zip(state.slabs, state.slots, strict=True)
    )


@pytest.mark.parametrize(
    "keys", [[3, 2, 1, 1, 2], [1] * 5, [0] * 5, [4] * 5, [], [0, 1, 2, 3, 4]], ids=str
)
@pytest.mark.parametrize("mesh_name", ["1", "2"])
def test_padding_touches_no_row(mesh_name, keys):
    """I09: a padded dedup filled up with the smallest id, so a real row moved for nothing."""
    emb = js.EmbeddingCollection(
        [js.FeatureSpec("f", table(rows=5, rule=js.Adagrad(0.5, initial_accumulator=0.25)))],
        mesh=make_mesh(mesh_name),
    )
    state = emb.init(jax.random.key(0))
    every = np.arange(5)
    before = emb.read(state, "t", every)
    bag = js.Ragged(np.array(keys, np.int64), np.array([0, len(keys)]))
    acts, residuals = emb.lookup(state, emb.pack({"f": bag}, rung=8))
    np.testing.assert_allclose(acts["f"][0], before[keys].sum(axis=0), rtol=1e-6, atol=1e-7)
    state = emb.update(state, residuals, {"f": jnp.ones_like(acts["f"])}, step=0)
    count = np.bincount(keys, minlength=5)[:, None].astype(np.float32)
    accumulator = np.broadcast_to(0.25 + count**2, (5, 4))
    np.testing.assert_array_equal(emb.read_slots(state, "t", every)["accumulator"], accumulator)
    after = emb.read(state, "t", every)
    np.testing.assert_allclose(after, before - 0.5 * count / np.sqrt(accumulator), rtol=1e-6)
    untouched = count[:, 0] == 0
    assert after[untouched].tobytes() == before[untouched].tobytes()
