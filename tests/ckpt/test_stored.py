# SPDX-License-Identifier: Apache-2.0
"""Checkpoints refuse tables whose rows lie with a row store, where it is not given."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.ckpt import restore_state, save_state
from jaxsparse.ckpt.row_files import RowFileError
from jaxsparse.ckpt.rows import import_rows
from tests.field_cases.layers import mesh_of


@partial(jax.tree_util.register_dataclass, data_fields=("embeddings",), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Tables:
    embeddings: js.EmbeddingState


def test_what_would_miss_rows_is_refused(tmp_path):
    spec = js.TableSpec("user", embedding_dim=2, keys=js.Dynamic(8), initializer=js.constant(0.0))
    emb = js.EmbeddingCollection([js.FeatureSpec("f", spec)], mesh=mesh_of(1))
    state = Tables(emb.init(jax.random.key(0)))
    with pytest.raises(js.CheckpointError, match=r"tables \['user'\] have .* pass store=, the js"):
        save_state(tmp_path / "a", emb, state)
    with pytest.raises(js.CheckpointError, match=r"tables \['user'\] have .* pass store=, the js"):
        restore_state(tmp_path / "a", emb, state)
    np.savez(tmp_path / "rows.npz", keys=np.arange(1), rows=np.zeros((1, 2), np.float32))
    with pytest.raises(RowFileError, match=r"table 'user' has Dynamic .* js.RowStore.write"):
        import_rows(emb, state.embeddings, "user", tmp_path / "rows.npz")
    assert not (tmp_path / "a").exists()
