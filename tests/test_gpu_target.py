# SPDX-License-Identifier: Apache-2.0
"""The machinery that compiles for GPUs which are not there gives programs that can be read."""

from __future__ import annotations

import json

import pytest

from tests.gpu_target import GPUS_PER_NODE, PYTHON_VARIABLE, num_all_to_alls, run_for_gpu

ALL_TO_ALL = """
import json, sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from tests.gpu_target import h200_mesh

mesh = h200_mesh(num_nodes=int(sys.argv[1]))
axes = mesh.axis_names
rows = 16 * mesh.size


def double_and_exchange(block):
    return jax.lax.all_to_all(2 * block, axes, 0, 0, tiled=True)


step = jax.jit(
    jax.shard_map(double_and_exchange, mesh=mesh, in_specs=P(axes), out_specs=P(axes)),
    donate_argnums=0,
)
sharding = NamedSharding(mesh, P(axes))
compiled = step.lower(
    jax.ShapeDtypeStruct((rows * mesh.size, 128), jnp.float32, sharding=sharding)
).compile()
memory = compiled.memory_analysis()
print(json.dumps({
    "axes": list(axes),
    "devices": mesh.size,
    "kind": mesh.devices.flat[0].device_kind,
    "platform": mesh.devices.flat[0].platform,
    "text": compiled.as_text(),
    "argument_bytes": memory.argument_size_in_bytes,
    "aliased_bytes": memory.alias_size_in_bytes,
}))
"""


@pytest.mark.gpu_compile
@pytest.mark.parametrize(("num_nodes", "axes"), [(1, ["shard"]), (2, ["node", "shard"])])
def test_an_exchange_compiles_for_h200s(num_nodes: int, axes: list[str]) -> None:
    got = json.loads(run_for_gpu(ALL_TO_ALL, str(num_nodes)))

    devices = num_nodes * GPUS_PER_NODE
    assert (got["devices"], got["axes"]) == (devices, axes)
    assert (got["platform"], got["kind"]) == ("gpu", "NVIDIA H200")
    assert f"num_partitions={devices}" in got["text"]
    assert num_all_to_alls(got["text"]) == 1
    # A device's block is [16 · devices, 128] float32 and the donated buffer is written in place.
    assert got["argument_bytes"] == got["aliased_bytes"] == 16 * devices * 128 * 4


def test_without_the_environment_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    with pytest.raises(pytest.skip.Exception, match=f"{PYTHON_VARIABLE} is not set"):
        run_for_gpu("")


@pytest.mark.gpu_compile
def test_a_failing_program_fails_the_test() -> None:
    with pytest.raises(pytest.fail.Exception, match="wrong on purpose"):
        run_for_gpu("raise SystemExit('wrong on purpose')")
