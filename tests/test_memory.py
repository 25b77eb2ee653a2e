# SPDX-License-Identifier: Apache-2.0
"""Promise 7: memory does not grow with steps, and donation takes nothing away (I04, I05)."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxsparse as js
from tests.combinations import make_mesh
from tests.small_trainers import batch_of, table

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]

SLOW = pytest.mark.slow

# ---- memory -----------------------------------------------------------------------------------

GROWTH = """
import ctypes, gc, os, sys
import jax, numpy as np
import jaxsparse as js
from tests.small_trainers import batch_of, make_trainer, ragged, table

def resident_kib():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed is no growth, wherever it lies
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

rng = np.random.default_rng(0)
features = [js.FeatureSpec("f", table()), js.FeatureSpec("g", table("u", placement="replicated"))]
trainer = make_trainer(js.make_mesh(), features)
batches = [
    batch_of({"f": ragged(rng, 500 + n, 64), "g": rng.integers(0, 1000, 64)}, 64)
    for n in range(25)
]
at = {}
def remember(event):
    at[event.step] = resident_kib()
trainer.fit(batches, steps=1000, log_every=100, callbacks=[remember], progress=False)
print(at[100], at[1000])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("num_devices", [1, 4])
def test_memory_does_not_grow_with_steps(num_devices):
    """Resident bytes from step 100 to 1,000 of `fit`, its metrics and history included."""
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", GROWTH],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    early, late = map(int, done.stdout.split())
    print(f"{num_devices} devices: {early} KiB at step 100, {late} KiB at step 1,000")
    assert late < 1.01 * early


@pytest.mark.parametrize("mesh_name", [pytest.param(m, marks=SLOW) for m in "14"] + ["8"])
def test_a_plan_tells_the_bytes_that_are_held(mesh_name):
    mesh = make_mesh(mesh_name)
    tables = [
        table("cut", 50_021, 16, js.Adam(0.1, per_row_count=True)),
        table("half", 30_011, 24, js.RowwiseAdagrad(0.1), dtype="bfloat16"),
        table("copied", 3_001, 16, js.Adagrad(0.1), placement="replicated"),
        table("one", 9_001, 16, js.Ftrl(0.1), placement="single"),
        table("two", 5_003, 16, js.Ftrl(0.1), placement="single"),
        table("planned", 40_009, 16, js.Ftrl(0.1), placement="auto"),
        table("frozen", 8_009, 12, trainable=False),
    ]
    emb = js.EmbeddingCollection([js.FeatureSpec(t.name, t) for t in tables], mesh=mesh)
    told = emb.plan.bytes_per_device
    held = dict.fromkeys(mesh.devices.flat, 0)
    for array in jax.tree.leaves(emb.init(jax.random.key(0))):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    for planned, device in zip(told, mesh.devices.flat, strict=True):
        assert held[device] == pytest.approx(planned, rel=0.05)
    print(f"mesh {mesh_name}: planned {told[0]} bytes a device, held {max(held.values())}")


# ---- donation ---------------------------------------------------------------------------------


def no_aliases(tree):
    """Whether every array of a tree has buffers of its own."""
    pointers = [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        for shard in leaf.addressable_shards
    ]
    return len(pointers) == len(set(pointers))


class Twins(nnx.Module):
    """Two parameters that begin as one array."""

    def __init__(self, array):
        self.first, self.second = nnx.Param(array), nnx.Param(array)

    def __call__(self, acts, dense, train=False):
        scores = sum((act @ self.first[...] for act in acts.values()), jnp.float32(0))
        return scores + self.second[...].sum()


@pytest.mark.parametrize("mesh_name", [pytest.param("1", marks=SLOW), "4"])
def test_shared_tables_and_aliased_arrays_are_donated_once(mesh_name):
    """I04: a buffer passed twice with donation hung, or raised later."""
    shared = table(rule=js.Adam(0.1))
    features = [js.FeatureSpec(name, shared) for name in ("seen", "clicked")]
    emb = js.EmbeddingCollection(features, mesh=make_mesh(mesh_name))
    trainer = js.Trainer(Twins(jnp.ones(4)), emb, optimizer=optax.adam(0.1))
    assert all(no_aliases(emb.init(jax.random.key(seed))) for seed in range(40))
    state = trainer.init(jax.random.key(0))
    # Adam's two moments and the twins are equal arrays, and must not become one; on several
    # devices the copies of a scalar are equal as well.
    assert no_aliases(state)
    keys = np.arange(16)
    for _ in range(3):
        state, outcome = trainer.step(state, batch_of({"seen": keys, "clicked": keys}, 16))
        assert bool(outcome["finite"])
    assert no_aliases(state)


@pytest.mark.parametrize("mesh_name", [pytest.param("1", marks=SLOW), "4"])
@pytest.mark.parametrize("make", [np.array, jnp.array])
def test_arrays_of_the_user_stay_as_they_are(mesh_name, make):
    """I05: a copy aliased the user's array, and donation took it away."""
    trained = table(rows=64, dim=16)  # 64-byte rows: what XLA for CPU borrows without a copy
    emb = js.EmbeddingCollection([js.FeatureSpec("f", trained)], mesh=make_mesh(mesh_name))
    rng = np.random.default_rng(0)
    given = {
        "rows": rng.random((64, 16), np.float32),
        "param": rng.random(16, np.float32),
        "keys": np.arange(64),
        "labels": np.arange(64, dtype=np.float32) % 2,
        "weights": np.ones(64, np.float32),
    }
    mine = {name: make(array) for name, array in given.items()}
    trainer = js.Trainer(Twins(mine["param"]), emb, optimizer=optax.adam(0.1))
    state = trainer.init(jax.random.key(0))
    start = emb.write(state.embeddings, "t", mine["keys"], mine["rows"])
    state = dataclasses.replace(state, embeddings=start)
    np.testing.assert_array_equal(emb.read(start, "t", mine["keys"]), given["rows"])
    batch = js.Batch({"f": mine["keys"]}, labels=mine["labels"], weights=mine["weights"])
    for _ in range(3):
        state, _ = trainer.step(state, batch)
    assert not np.array_equal(emb.read(state.embeddings, "t", mine["keys"]), given["rows"])
    for name, array in mine.items():
        np.testing.assert_array_equal(array, given[name], err_msg=name)
    # The trainer still has its own initial parameters: it can begin again.
    again = trainer.init(jax.random.key(0))
    assert np.array_equal(jax.tree.leaves(again.params)[0], given["param"])
