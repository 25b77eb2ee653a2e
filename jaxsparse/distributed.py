# SPDX-License-Identifier: Apache-2.0
"""Processes of one job find each other, prove their collectives, and leave together.

`initialize` reads the environment and calls `jax.distributed`; it has to come before any device is
used. Three kinds of environment are known:

- ``jaxsparse launch`` sets ``JAXSPARSE_COORDINATOR`` (host:port of process 0),
  ``JAXSPARSE_NUM_PROCESSES`` and ``JAXSPARSE_PROCESS_ID``; any other starter may do the same;
- an indexed Kubernetes job sets the first two, and Kubernetes ``JOB_COMPLETION_INDEX``
  (``examples/cluster/kubernetes.yaml``);
- a SLURM step of several tasks has all it takes in ``SLURM_…`` (``examples/cluster/slurm.sh``).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxsparse.processes import local_devices, put_blocks

COORDINATOR = "JAXSPARSE_COORDINATOR"
NUM_PROCESSES = "JAXSPARSE_NUM_PROCESSES"
PROCESS_ID = "JAXSPARSE_PROCESS_ID"
LAUNCHED = "JAXSPARSE_LAUNCHED"
KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")

HEARTBEAT_TIMEOUT_S = 30
"""After so long without a sign of life a process counts as dead and the others end."""

PR_SET_PDEATHSIG = 1
"""From Linux' sys/prctl.h."""


class Job(NamedTuple):
    """Which process of how many this is, and where process 0 listens."""

    process_id: int
    num_processes: int
    coordinator: str | None
    """None where jax finds it by itself: under SLURM."""


def job_of(environment: Mapping[str, str]) -> Job | None:
    """The job an environment tells of; None for a process on its own.

    Raises:
        ValueError: it is told in part, or a number is none.

    >>> job_of({"JAXSPARSE_COORDINATOR": "10.0.0.1:1234", "JAXSPARSE_NUM_PROCESSES": "2",
    ...         "JOB_COMPLETION_INDEX": "1"})
    Job(process_id=1, num_processes=2, coordinator='10.0.0.1:1234')
    """
    own = [name for name in (COORDINATOR, NUM_PROCESSES, PROCESS_ID) if name in environment]
    if own:
        index = PROCESS_ID if PROCESS_ID in environment else KUBERNETES_INDEX
        missing = [n for n in (COORDINATOR, NUM_PROCESSES, index) if n not in environment]
        if missing:
            raise ValueError(
                f"{', '.join(own)} is set but {', '.join(missing)} is not; set {COORDINATOR} "
                f"(host:port), {NUM_PROCESSES} and {PROCESS_ID} in every process, or none of them"
            )
        return _checked(environment, index, NUM_PROCESSES, environment[COORDINATOR])
    # Inside `salloc` or a batch script, outside of srun, there is no step: a process on its own.
    if all(name in environment for name in SLURM) and environment["SLURM_NTASKS"] != "1":
        return _checked(environment, "SLURM_PROCID", "SLURM_NTASKS", None)
    return None


def _checked(
    environment: Mapping[str, str], index: str, count: str, coordinator: str | None
) -> Job:
    numbers = []
    for name in (index, count):
        if not environment[name].isdecimal():
            raise ValueError(f"{name} must be a number, got {environment[name]!r}")
        numbers.append(int(environment[name]))
    if not numbers[0] < numbers[1]:
        raise ValueError(f"{index} must be below {count}, got {numbers[0]} and {numbers[1]}")
    return Job(numbers[0], numbers[1], coordinator)


_joined: Job | None = None


def initialize() -> Job | None:
    """Joins the job the environment tells of; None, and nothing done, for a process on its own.

    Call it before anything touches a device. A second call returns the job joined.

    Raises:
        ValueError: as `job_of`.
        RuntimeError: a device was used before, or process 0 could not be reached.
    """
    global _joined
    if _joined is not None:
        return _joined
    job = job_of(os.environ)
    if job is None:
        return None
    if LAUNCHED in os.environ:
        _die_with_the_launcher()
    # Its SIGTERM handler would swallow the signal that training saves and ends by.
    jax.config.update("jax_enable_preemption_service", False)
    places: dict[str, Any] = {"cluster_detection_method": "slurm"}
    if job.coordinator is not None:
        places = {
            "cluster_detection_method": "deactivate",
            "coordinator_address": job.coordinator,
            "num_processes": job.num_processes,
            "process_id": job.process_id,
        }
    jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S, **places)
    _joined = job
    return job


def joined() -> Job | None:
    """The job that `initialize` joined."""
    return _joined


def is_first() -> bool:
    """Whether this process speaks for the job: it is process 0, or on its own; uses no device."""
    return _joined is None or _joined.process_id == 0


def exit_from_job(code: int) -> int:
    """Ends a process that failed inside a job at once; elsewhere returns ``code``.

    The ordinary exit waits minutes for the other processes, and those wait in a collective for
    this one: only its death tells them.
    """
    if _joined is None or code == 0:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_with_the_launcher() -> None:
    """A launcher that is killed outright can end nobody: let the kernel do it (Linux)."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (AttributeError, OSError):
        return


ROUNDS = 30
CHUNKS = (1 << 20, 1 << 16)
"""Bytes sent from each device to each: 256 KiB and 4 MiB of a device's memory on 4 devices."""


def check_collectives(mesh: Mesh, rounds: int = ROUNDS, chunks: tuple[int, ...] = CHUNKS) -> None:
    """Compares the collectives that training uses with numpy, on a mesh's devices; a collective.

    All-to-all, sum and all-gather of float32; reduce-scatter, which has returned wrong values on
    CPU over several processes, is used nowhere.

    Args:
        mesh: the mesh.
        rounds: times each is done, with other values.
        chunks: bytes sent from each device to each.

    Raises:
        RuntimeError: values differ; names operation, size, round and process.
    """
    devices = np.arange(mesh.devices.size)[local_devices(mesh)]
    for chunk in chunks:
        for turn in range(rounds):
            given = _numbers(np.arange(mesh.devices.size), mesh.devices.size * chunk // 4, turn)
            cut = PartitionSpec(tuple(mesh.axis_names))
            got = _collectives(mesh, put_blocks(given[devices], mesh, cut))
            _compare(given, devices, got, f"{chunk:,} bytes a chunk, round {turn}")


def _numbers(devices: npt.NDArray[Any], size: int, turn: int) -> npt.NDArray[np.float32]:
    """``[N, size]`` integers below 2^14, so that float32 sums over 1,024 devices are exact."""
    base = np.arange(size) * (2 * devices[:, None] + 1) + 7919 * turn + devices[:, None]
    numbers: npt.NDArray[np.float32] = (base % 16381).astype(np.float32)
    return numbers


@partial(jax.jit, static_argnums=0)
def _collectives(mesh: Mesh, numbers: jax.Array) -> Any:
    axes = tuple(mesh.axis_names)

    def local(mine: jax.Array) -> Any:
        chunks = mine.reshape(mesh.devices.size, -1)
        return (
            lax.all_to_all(chunks, axes, 0, 0, tiled=True),
            lax.psum(chunks, axes),
            lax.all_gather(chunks[0], axes),
        )

    cut = PartitionSpec(axes)
    return jax.shard_map(local, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False)(numbers)


def _compare(
    given: npt.NDArray[np.float32], devices: npt.NDArray[Any], got: Any, what: str
) -> None:
    count = len(given)
    chunks = given.reshape(count, count, -1)
    wanted: dict[str, Callable[[int], Any]] = {
        "all-to-all": lambda device: chunks[:, device],
        "psum": lambda _: chunks.sum(axis=0),
        "all-gather": lambda _: chunks[:, 0],
    }
    for (name, want), array in zip(wanted.items(), got, strict=True):
        shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        for device, shard in zip(devices, shards, strict=True):
            wrong = np.asarray(shard.data) != want(device)
            if wrong.any():
                raise RuntimeError(
                    f"check_collectives: {name} gives {int(wrong.sum())} of {wrong.size} wrong "
                    f"values on device {device} of process {jax.process_index()} ({what}); do not "
                    "train on this installation"
                )
