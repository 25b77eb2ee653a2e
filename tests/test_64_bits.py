# SPDX-License-Identifier: Apache-2.0
"""Keys and addresses of 64 bits are exact while jax counts in 32, or are refused (I10)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.layout import MAX_ROWS_PER_SHARD
from jaxsparse.packing import distinct
from tests.combinations import make_mesh
from tests.small_trainers import table


def test_more_rows_than_int32_can_count_are_refused():
    """I10: what 32 bits cannot address is refused with need and have, before any allocation."""
    big = table("big", rows=2 * 2**31)
    with pytest.raises(ValueError, match=r"needs 4,294,967,296 rows on a shard, .* 2,147,483,646"):
        make_layout_on("1", big)
    with pytest.raises(ValueError, match="'big' sharded"):
        make_layout_on("2", big)
    with pytest.raises(ValueError, match="'big' replicated"):
        make_layout_on("4", dataclasses.replace(big, placement="replicated"))
    with pytest.raises(ValueError, match="'big' single"):
        make_layout_on("4", dataclasses.replace(big, placement="single"))
    (slab,) = make_layout_on("4", big).slabs
    assert slab.rows_per_shard <= MAX_ROWS_PER_SHARD
    # Two that fit alone, but not together in one slab.
    with pytest.raises(ValueError, match="rows on a shard"):
        make_layout_on("2", dataclasses.replace(big, vocabulary_size=3 * 10**9), table("u", 2**31))


def make_layout_on(mesh_name, *tables):
    features = [js.FeatureSpec(t.name, t) for t in tables]
    return js.EmbeddingCollection(features, mesh=make_mesh(mesh_name)).layout


EXTREMES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("mesh_name", ["1", "4"])
def test_keys_of_64_bits_stay_apart_with_x64_off(mesh_name):
    assert not jax.config.jax_enable_x64
    rng = np.random.default_rng(0)
    random_keys = rng.integers(0, 2**64, 150, np.uint64, endpoint=False)
    # Neighbours that a float64, or the low or the high half alone, would take for one.
    near = np.array([2**53, 2**54 + 2, 2**60 + 1, 2**60 + 2, 7 + (1 << 40), 7], np.uint64)
    keys = np.unique(np.concatenate([np.array(EXTREMES, np.uint64), random_keys, near]))
    hashed = table(rows=2**20, dim=3, rule=js.SGD(1.0), keys=js.Hashed())
    emb = js.EmbeddingCollection([js.FeatureSpec("f", hashed)], mesh=make_mesh(mesh_name))
    rows = hashed.keys.rows(keys, 2**20)
    assert np.unique(rows).size == keys.size, "keys were chosen without collisions"
    values = np.arange(keys.size * 3, dtype=np.float32).reshape(-1, 3)
    state = emb.write(emb.init(jax.random.key(0)), "t", keys, values)

    signed = keys.view(np.int64)
    for same in (keys, signed, keys.astype(object)):
        np.testing.assert_array_equal(emb.read(state, "t", same), values)
        acts, residuals = emb.lookup(state, emb.pack({"f": same}))
        np.testing.assert_array_equal(np.asarray(acts["f"])[: keys.size], values)
    bags = js.Ragged.from_lengths(signed, np.ones(keys.size, np.int64))
    acts, _ = emb.lookup(state, emb.pack({"f": bags}))
    np.testing.assert_array_equal(np.asarray(acts["f"])[: keys.size], values)

    grads = np.zeros(acts["f"].shape, np.float32)
    grads[: keys.size] = np.arange(keys.size)[:, None]
    state = emb.update(state, residuals, {"f": jnp.asarray(grads)}, step=0)
    want = values - np.arange(keys.size, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(emb.read(state, "t", signed), want)


@pytest.mark.parametrize(
    ("mesh_name", "num_rows"),
    [("3", 5 * 10**9), ("8", 5 * 10**9), ("2x4", 5 * 10**9), ("8", 2**33 + 1)],
)
def test_addresses_beyond_32_bits_are_exact(mesh_name, num_rows):
    """`pack` for tables of which no device here could hold a part."""
    rng = np.random.default_rng(0)
    big = table(rows=num_rows)
    beside = table("u", rows=1000)  # so that the second block has an offset
    mesh = make_mesh(mesh_name)
    features = [js.FeatureSpec("g", beside), js.FeatureSpec("f", big)]
    emb = js.EmbeddingCollection(features, mesh=mesh)
    keys = np.concatenate([rng.integers(0, num_rows, 500), [0, 1, num_rows - 1, num_rows // 2]])
    keys = np.concatenate([keys, keys[:96]])
    ids = emb.pack({"f": keys, "g": np.full(keys.size, 3)})

    slab, index = emb.layout.find("t")
    block, shards = slab.tables[index], mesh.size
    assert slab.rows_per_shard * shards > 2**32
    capacity = ids.slabs[0].capacity
    by_device = np.asarray(ids.slabs[0].rows).reshape(shards, shards, capacity)
    inverse = np.asarray(ids.slabs[0].inverse).reshape(shards, -1)
    samples = ids.padded_samples // shards
    (column,) = [n for n, (name, _) in enumerate(ids.slabs[0].fixed) if name == "f"]
    found = []
    for device in range(shards):
        places = inverse[device, column * samples : (column + 1) * samples]
        places = places[places < shards * capacity]
        for place in places.tolist():  # python integers: no width to overflow
            owner, local = divmod(place, capacity)
            local = int(by_device[device, owner, local])
            found.append(owner * block.rows + local - block.offset)
    np.testing.assert_array_equal(block.addressing.id_at(np.array(found, np.int64)), keys)


@pytest.mark.parametrize("rows_per_shard", [1, 2**31 - 2, 2**40, 2**52])
def test_distinct_codes_beyond_32_bits_are_exact(rows_per_shard):
    """Both ways of sorting: one word for code and index, and where they do not fit one."""
    rng = np.random.default_rng(0)
    num_owners = 1024
    codes = rng.integers(0, num_owners * rows_per_shard, 5000)
    codes[rng.random(5000) < 0.1] = -1
    codes[:100] = codes[100:200]
    codes[-1] = num_owners * rows_per_shard - 1
    found = distinct(codes, num_owners, rows_per_shard)
    real = codes[codes >= 0]
    want, counts = np.unique(real, return_counts=True)
    np.testing.assert_array_equal(found.codes, want)
    np.testing.assert_array_equal(found.counts, counts)
    np.testing.assert_array_equal(codes[found.order], np.sort(real))
    owners = [code // rows_per_shard for code in want.tolist()]
    assert np.diff(found.bounds).tolist() == np.bincount(owners, minlength=num_owners).tolist()
