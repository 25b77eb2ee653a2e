# SPDX-License-Identifier: Apache-2.0
"""A small run to save, stop and take up again: the same data, model and arguments every time."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxsparse as js
from jaxsparse.ckpt import state_leaves
from jaxsparse.models import DLRM

ROWS, BATCH, USERS, ITEMS = 203, 16, 211, 37
TIMES = {
    "samples_per_s",
    "samples_per_s_p50",
    "step_ms_p50",
    "step_ms_p95",
    "step_ms_max",
    "save_ms",
    "input_ms",
    "input_wait",
    "device_bytes",
}


class Logged:
    """A dataset that writes the row ids of every batch it yields; a batch's first dense column."""

    def __init__(self, dataset: Any, write: Callable[[list[int]], None] | None = None) -> None:
        self.dataset, self.write = dataset, write
        self.ids: list[list[int]] = []
        self.state, self.restore = dataset.state, dataset.restore

    def __iter__(self) -> Iterator[js.Batch]:
        for batch in self.dataset:
            ids = [int(x) for x in np.rint(batch.dense[:, 0] * ROWS)]
            self.ids.append(ids)
            if self.write:
                self.write(ids)
            yield batch


def columns() -> dict[str, Any]:
    rng = np.random.default_rng(11)
    user, item = rng.integers(0, USERS, ROWS), rng.integers(0, ITEMS, ROWS)
    return {
        "user": user,
        "item": item,
        "row": np.arange(ROWS) / ROWS,
        "label": (rng.random(ROWS) < 0.2 + 0.6 * ((user + item) % 3 == 0)).astype(int),
    }


def train_data(write: Callable[[list[int]], None] | None = None, seed: int = 5) -> Logged:
    data = js.data.from_arrays(columns(), BATCH, dense=["row"], shuffle=True, seed=seed)
    return Logged(data, write)


def eval_data() -> Any:
    return js.data.from_arrays(columns(), 64, dense=["row"])


class Dropping(nnx.Module):
    """DLRM behind a dropout layer and a batch norm: state that is neither parameter nor table."""

    def __init__(self, features: Any) -> None:
        rngs = nnx.Rngs(3)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.norm = nnx.BatchNorm(1, rngs=rngs)
        self.dlrm = DLRM.for_features(features, num_dense=1, bottom=(4,), top=(8,), rngs=rngs)

    def __call__(self, acts: Any, dense: Any, train: bool = False) -> Any:
        dense = self.norm(dense, use_running_average=not train)
        acts = {n: self.drop(a, deterministic=not train) for n, a in acts.items()}
        return self.dlrm(acts, dense)


def make_trainer(
    devices: int = 2,
    *,
    sparse: Any = None,
    users: int = USERS,
    plain: bool = False,
    mesh: Any = None,
    **table: Any,
) -> Any:
    """A trainer; ``plain`` leaves out the layers whose results depend on the mesh."""
    table.setdefault("placement", "sharded")
    user = js.TableSpec(
        "user", vocabulary_size=users, embedding_dim=4, optimizer=sparse or js.Adam(0.05), **table
    )
    item = js.TableSpec("item", vocabulary_size=ITEMS, embedding_dim=4)
    features = [js.FeatureSpec("user", user), js.FeatureSpec("item", item)]
    mesh = mesh or js.make_mesh(devices=jax.devices()[:devices])
    emb = js.EmbeddingCollection(features, mesh=mesh)
    dropping = Dropping(features)
    return js.Trainer(dropping.dlrm if plain else dropping, emb, optimizer=optax.adam(1e-2))


def loaded(trainer: Any, folder: pathlib.Path, batch: js.Batch, step: int = 6) -> Any:
    """The rows and slots of a save by table, and the loss of the step after it."""
    restored = js.CheckpointManager(folder).restore(
        trainer.emb, trainer.init(jax.random.key(9)), step
    )
    held = {}
    for name, table in trainer.emb.tables.items():
        keys = np.arange(table.vocabulary_size)
        held[name] = trainer.emb.read(restored.state.embeddings, name, keys)
        held |= {
            f"{name}.{slot}": values
            for slot, values in trainer.emb.read_slots(
                restored.state.embeddings, name, keys
            ).items()
        }
    _, outcome = trainer.step(restored.state, batch)
    return held, float(outcome["loss"])


def leaves(trainer: Any, state: Any) -> dict[str, Any]:
    return state_leaves(trainer.emb, state)


def without_times(rows: list[dict[str, Any]]) -> list[str]:
    """Rows as text, all digits of every number, times left out."""
    kept = [{n: v for n, v in row.items() if n not in TIMES} for row in rows]
    return [json.dumps(row) for row in kept]


def rows_of(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    different = [n for n in want if np.asarray(got[n]).tobytes() != np.asarray(want[n]).tobytes()]
    assert not different, different
