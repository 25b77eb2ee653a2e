# SPDX-License-Identifier: Apache-2.0
"""Programs are compiled once, also after a restore."""

from __future__ import annotations

import jax

import jaxsparse as js
from jaxsparse.testing import count_compiles
from tests.ckpt import runs


def test_i02_a_restored_state_compiles_nothing_again(tmp_path):
    trainer = runs.make_trainer(2)
    batches = [trainer.pack(b) for _, b in zip(range(10), runs.train_data(), strict=False)]
    state = trainer.init(jax.random.key(0))
    state, _ = trainer.step(state, batches[0])
    with count_compiles() as count:
        for batch in batches[1:5]:
            state, _ = trainer.step(state, batch)
    assert count.programs == 0
    manager = js.CheckpointManager(tmp_path)
    manager.save(trainer.emb, state)
    state = manager.restore(trainer.emb, trainer.init(jax.random.key(1))).state
    with count_compiles() as count:
        for batch in batches[5:]:
            state, _ = trainer.step(state, batch)
    assert count.programs == 0
