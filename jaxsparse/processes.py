# SPDX-License-Identifier: Apache-2.0
"""Global arrays of a mesh that several processes share: made, read back, and agreed upon.

Devices are process-major: those of a process lie side by side in the flattened mesh, so its block
of a global array is one slice. What says so below is a collective: every process must call it, in
the same order and from the thread that runs its programs. On a mesh of one process the same
functions are plain copies.
"""

from __future__ import annotations

import pickle
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsparse.ladder import bucket

NOTHING = int(np.iinfo(np.int32).min)
"""What a process votes that has nothing to say: the maximum leaves it out."""

Int32s = npt.NDArray[np.int32]


@lru_cache(maxsize=64)
def is_shared(mesh: Mesh) -> bool:
    """Whether devices of several processes are in the mesh.

    A job of one process may compile for devices of several that are not there; it has nobody to
    share with.
    """
    processes = {device.process_index for device in mesh.devices.flat}
    return len(processes) > 1 and jax.process_count() > 1


@lru_cache(maxsize=64)
def local_devices(mesh: Mesh) -> slice:
    """This process's devices as a slice of the flattened mesh.

    Raises:
        ValueError: it has none, or they do not lie side by side.
    """
    mine = [device.process_index == jax.process_index() for device in mesh.devices.flat]
    places = np.flatnonzero(mine)
    if places.size == 0:
        raise ValueError(
            f"process {jax.process_index()} has no device in the mesh; give every process's "
            "devices, as make_mesh() does, or leave this process out of the job"
        )
    if np.ptp(places) + 1 != places.size:
        raise ValueError(
            f"the devices of process {jax.process_index()} must lie side by side in the mesh, "
            f"they are at {places.tolist()}; order devices by process, as make_mesh() does"
        )
    return slice(int(places[0]), int(places[-1]) + 1)


_sharding = lru_cache(maxsize=64)(NamedSharding)


def put_blocks(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """Global arrays from each process's blocks (cut ones) or equal copies (whole ones).

    Args:
        tree: numpy arrays; those cut along dimension 0 hold this process's devices' blocks.
        mesh: the mesh.
        specs: PartitionSpec of every array, cut along dimension 0 over all axes or whole.
    """
    shardings = jax.tree.map(
        partial(_sharding, mesh), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    if not is_shared(mesh):
        return jax.device_put(tree, shardings)
    devices = local_devices(mesh)
    share = mesh.devices.size, devices.stop - devices.start

    def put(block: Any, sharding: NamedSharding) -> jax.Array:
        block = np.asarray(block)
        shape = block.shape
        if sharding.spec != PartitionSpec():
            shape = (shape[0] * share[0] // share[1], *shape[1:])
        made: jax.Array = jax.make_array_from_process_local_data(sharding, block, shape)
        return made

    return jax.tree.map(put, tree, shardings)


def local_block(array: jax.Array) -> npt.NDArray[Any]:
    """This process's block of an array cut along dimension 0, on the host; no collective."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def start_maximum(mesh: Mesh, votes: npt.ArrayLike) -> jax.Array:
    """Dispatches the elementwise maximum over processes of ``[k]`` int32; a collective.

    The result can be read with `numpy.asarray` while programs dispatched later run.
    """
    row = np.asarray(votes, np.int32)[None]
    devices = local_devices(mesh)
    rows = np.repeat(row, devices.stop - devices.start, axis=0)
    cut = PartitionSpec(tuple(mesh.axis_names))
    result: jax.Array = _maximum(mesh, put_blocks(rows, mesh, cut))
    return result


@partial(jax.jit, static_argnums=0)
def _maximum(mesh: Mesh, rows: jax.Array) -> Any:
    axes = tuple(mesh.axis_names)
    return jax.shard_map(
        lambda rows: lax.pmax(rows[0], axes),
        mesh=mesh,
        in_specs=PartitionSpec(axes),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(rows)


def maximum(mesh: Mesh, votes: npt.ArrayLike) -> Int32s:
    """Elementwise maximum over processes of ``[k]`` int32, waited for; a collective."""
    if not is_shared(mesh):
        return np.asarray(votes, np.int32)
    return np.asarray(start_maximum(mesh, votes))


def gather(mesh: Mesh, value: Any) -> list[Any]:
    """Every process's ``value`` (anything that pickles), in process order; a collective.

    The same list in every process; with one process, the list of its value. Float64 and integers
    arrive as they are, whatever `jax_enable_x64` says.
    """
    if not is_shared(mesh):
        return [value]
    payload = np.frombuffer(pickle.dumps(value), np.uint8)
    devices = local_devices(mesh)
    share = devices.stop - devices.start
    # Cut over the process's devices, so that none carries a copy.
    chunk = bucket(int(maximum(mesh, [-(-payload.size // share)])[0]))
    block = np.zeros((share, chunk), np.uint8)
    block.reshape(-1)[: payload.size] = payload
    cut = PartitionSpec(tuple(mesh.axis_names))
    sizes = put_blocks(np.full((share, 1), payload.size, np.int32), mesh, cut)
    all_sizes, chunks = map(np.asarray, _whole(mesh, (sizes, put_blocks(block, mesh, cut))))
    owners = np.array([device.process_index for device in mesh.devices.flat])
    values = []
    for start in np.flatnonzero(np.diff(owners, prepend=-1)):
        mine = owners == owners[start]
        values.append(pickle.loads(chunks[mine].reshape(-1)[: all_sizes[start, 0]].tobytes()))
    return values


@partial(jax.jit, static_argnums=0)
def _whole(mesh: Mesh, tree: Any) -> Any:
    axes = tuple(mesh.axis_names)
    return jax.shard_map(
        lambda tree: jax.tree.map(lambda x: lax.all_gather(x, axes, tiled=True), tree),
        mesh=mesh,
        in_specs=PartitionSpec(axes),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(tree)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """A copy of ``tree`` on every device of ``mesh``; each process must pass equal values.

    The copy is made inside jit: it shares no buffer with the caller's arrays, which stay usable
    when the state is donated.
    """
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda t: jax.tree.map(jnp.copy, t), out_shardings=sharding)(tree)
