# SPDX-License-Identifier: Apache-2.0
"""`TrainState`: everything a step changes, one frozen pytree that every step donates."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.state import EmbeddingState


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "params", "model_state", "opt_state", "embeddings", "rng"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a training run; all but the tables is replicated."""

    step: jax.Array
    """int32 scalar: updates made so far."""
    params: Any
    """Dense parameters, an ``nnx.State`` of ``nnx.Param``."""
    model_state: Any
    """The model's other variables, such as batch statistics and dropout counters."""
    opt_state: Any
    """State of the dense optax optimizer."""
    embeddings: EmbeddingState
    """Tables, slots and sparse learning rates."""
    rng: jax.Array
    """Typed key of the run; dropout folds the device into it."""


@jax.jit
def copy_state(state: TrainState) -> TrainState:
    """A copy that survives the donation of ``state``; needs its memory once more."""
    return jax.tree.map(jnp.copy, state)  # type: ignore[no-any-return]


def device_bytes(state: TrainState) -> int:
    """Bytes in use on this process's fullest device: as it tells, else the state's arrays there."""
    devices: set[Any] = set(state.step.sharding.addressable_devices)
    told = [stats["bytes_in_use"] for d in devices if (stats := d.memory_stats())]
    if told:
        return int(max(told))
    held = dict.fromkeys(devices, 0)
    arrays = dataclasses.replace(state, rng=jax.random.key_data(state.rng))
    for leaf in jax.tree.leaves((arrays.params, arrays.opt_state, arrays.embeddings, arrays.rng)):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values())
