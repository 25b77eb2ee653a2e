# SPDX-License-Identifier: Apache-2.0
"""The section of a run on Criteo's format, and training from the stream as from memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxsparse as js
from jaxsparse.config import read_toml
from jaxsparse.data import CriteoFiles, Prefetcher, from_arrays
from jaxsparse.data.criteo import CATEGORIES
from jaxsparse.data.joining import join_batches
from jaxsparse.models import DLRM
from jaxsparse.testing import assert_trees_equal
from tests.data.files import criteo_bytes, criteo_cells, write_bytes


def test_splits(tmp_path: Path) -> None:
    for day in range(3):
        rows = criteo_cells(20, first=20 * day)
        write_bytes(tmp_path / f"day_{day}.tsv.gz", criteo_bytes(rows))
    files = CriteoFiles(dir=str(tmp_path), train="day_[01].tsv.gz", test=("day_2.tsv.gz",))
    train, test = files.stream("train", 8, shuffle=True), files.stream("test", 8)
    assert train is not None and train.num_rows == 40
    assert test is not None and test.num_rows == 20
    assert files.stream("valid", 8) is None
    assert files.paths("test") == [f"{tmp_path}/day_2.tsv.gz"]
    assert CriteoFiles(dir="s3://logs", train="a", test="/b").paths("train") == ["s3://logs/a"]
    assert (len(files.feature_names), files.num_dense) == (26, 13)
    with pytest.raises(ValueError, match="on_bad_row must be one of"):
        CriteoFiles(train="a", on_bad_row="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shuffle_rows must be >= 1, got 0"):
        CriteoFiles(train="a", shuffle_rows=0)


def test_the_example_is_a_section() -> None:
    table = read_toml(Path(__file__).parents[2] / "examples" / "criteo.toml")["data"]
    assert table.pop("kind") == "criteo"
    assert CriteoFiles(**table).train == "train*.tsv.gz"


@pytest.mark.slow
def test_training_from_a_stream_is_training_from_memory(tmp_path: Path) -> None:
    path = write_bytes(tmp_path / "a.tsv", criteo_bytes(criteo_cells(60)))
    stream = CriteoFiles(train=str(path)).stream("train", 16)
    assert stream is not None
    rows = join_batches(list(stream))
    assert rows.dense is not None
    columns: dict[str, Any] = {**rows.features, "label": rows.labels}
    columns |= {f"I{n}": rows.dense[:, n] for n in range(13)}
    memory = from_arrays(columns, 16, dense=[f"I{n}" for n in range(13)])

    table = js.TableSpec("all", vocabulary_size=100, embedding_dim=4, keys=js.Hashed())
    features = [js.FeatureSpec(name, table) for name in CATEGORIES]
    emb = js.EmbeddingCollection(features, mesh=js.make_mesh(devices=jax.devices()[:2]))
    model = DLRM.for_features(features, num_dense=13, bottom=(4,), top=(), rngs=nnx.Rngs(0))
    trainer = js.Trainer(model, emb, optimizer=optax.sgd(0.1))
    expected = trainer.fit(memory, epochs=2, progress=False).state
    assert int(expected.step) == 8
    assert np.isfinite(np.asarray(jax.tree.leaves(expected.params)[0])).all()

    state = trainer.fit(Prefetcher(stream), epochs=2, progress=False).state
    assert_trees_equal(state.embeddings, expected.embeddings)
    assert_trees_equal(state.params, expected.params)
    state = trainer.init(jax.random.key(0))
    for packed in itertools.chain(*itertools.repeat(Prefetcher(stream, trainer.pack), 2)):
        assert packed is not None
        state, _ = trainer.step(state, packed)
    assert_trees_equal(state.embeddings, expected.embeddings)
    assert_trees_equal(state.params, expected.params)
