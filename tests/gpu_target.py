# SPDX-License-Identifier: Apache-2.0
"""GPUs that are not there, to lower and compile programs for; imports jax only, not the package.

Runs in the environment that ``make gpu-venv`` makes: jax and its CUDA compiler without CUDA itself.
Compiling needs no device, so the memory plan, the aliasing, the collectives and the PTX of a
program can be read on any machine. Two things do not show: speed, and memory kinds.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

GPUS_PER_NODE = 8

PYTHON_VARIABLE = "JAXSPARSE_GPU_COMPILE_PYTHON"
"""Environment variable that names the python of the environment to compile in."""

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
_TIMEOUT_S = 900

# A `GpuTargetConfigProto` in text form; sizes in bytes, bandwidth in bytes/s.
_TARGET = """\
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  threads_per_core_limit: 2048 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  {device}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""

H200 = _TARGET.format(
    name="NVIDIA H200",
    device="""\
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 l2_cache_size: 52428800
  memory_bandwidth: 4800000000000 device_memory_size: 151397597184
  cuda_compute_capability { major: 9 }""",
)

A100 = _TARGET.format(
    name="NVIDIA A100-SXM4-80GB",
    device="""\
  core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41
  shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912 l2_cache_size: 41943040
  memory_bandwidth: 2039000000000 device_memory_size: 85094825984
  cuda_compute_capability { major: 8 }""",
)


def gpu_devices(target: str, num_nodes: int = 1, per_node: int = GPUS_PER_NODE) -> list[jax.Device]:
    """Devices of a cluster that exists on paper: fit for meshes and for ``.lower().compile()``."""
    from jax.experimental import topologies

    description = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=target,
        topology=f"1x{num_nodes}x{per_node}",
    )
    return list(description.devices)


def h200_mesh(num_nodes: int = 1) -> jax.sharding.Mesh:
    """Mesh over eight H200s a node: axis ``shard``, or ``node`` and ``shard`` for several nodes."""
    import jax
    import numpy as np

    devices = np.array(gpu_devices(H200, num_nodes))
    if num_nodes == 1:
        return jax.sharding.Mesh(devices, ("shard",))
    return jax.sharding.Mesh(devices.reshape(num_nodes, GPUS_PER_NODE), ("node", "shard"))


def num_all_to_alls(compiled_text: str) -> int:
    """Exchanges in a compiled program: a start-and-done pair, or one operation where jax ≥ 0.12
    finds nothing to run beside it."""
    return len(re.findall(r" all-to-all(?:-start)?\(", compiled_text))


def run_for_gpu(program: str, *arguments: str) -> str:
    """Run the text of a Python program in the compile environment; returns what it printed.

    The program can ``from tests.gpu_target import h200_mesh``. Skips the calling test where no
    such environment is named, fails it where the program fails.
    """
    import pytest  # not in the compile environment, which imports this module too

    from tests import program_cache

    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        pytest.skip(f"{PYTHON_VARIABLE} is not set; `make test-slow` makes the environment")
    environment = dict(os.environ)
    # The compiler itself is what is asked, not what it said before.
    environment.pop(program_cache.FOLDER, None)
    environment.update(
        # The compiler is there, CUDA's libraries are not: nothing may check for them or start it.
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        JAX_PLATFORMS="cpu",
        PYTHONPATH=str(_REPOSITORY),
    )
    done = subprocess.run(
        [python, "-c", program, *arguments],
        cwd=_REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode != 0:
        pytest.fail(f"program for the GPU ended with {done.returncode}:\n{done.stderr[-8000:]}")
    return done.stdout
