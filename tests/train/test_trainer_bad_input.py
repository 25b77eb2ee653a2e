# SPDX-License-Identifier: Apache-2.0
"""What the trainer skips and what it refuses: bad samples, steps, shapes and arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxsparse as js
from jaxsparse.packed_batch import pack_batch
from jaxsparse.testing import assert_trees_equal
from tests.train.trainers import BATCHES, TwoTasks, changed, trainer_of


@pytest.fixture(scope="module")
def trainer():
    return trainer_of()


# ---- bad samples and steps --------------------------------------------------------------------


def with_bad_dense(batch):
    dense = batch.dense.copy()
    dense[2, 0] = np.nan
    return changed(batch, dense=dense)


def test_skipped_batches_are_counted_to_the_last():
    trainer = trainer_of(on_bad_sample="skip")
    data = [BATCHES[0], with_bad_dense(BATCHES[1])]
    history = trainer.fit(data, epochs=2, log_every=2, progress=False).history
    assert [(row["step"], row["skipped_batches"]) for row in history] == [(2, 1), (2, 1)]


def test_policies_hold_in_evaluation_too():
    batch = with_bad_dense(BATCHES[1])
    good = BATCHES[1].take([0, 1, 3, 4, 5, 6, 7])
    trainers = {policy: trainer_of(on_bad_sample=policy) for policy in ("error", "skip", "drop")}
    state = trainers["error"].init(jax.random.key(0))
    with pytest.raises(ValueError, match="dense is nan in sample 2, column 0"):
        trainers["error"].evaluate(state, [batch])
    assert trainers["drop"].evaluate(state, [batch]) == trainers["error"].evaluate(state, [good])
    kept = trainers["skip"].evaluate(state, [batch, BATCHES[0]])
    assert kept == trainers["error"].evaluate(state, [BATCHES[0]])
    assert np.isnan(trainers["error"].predict(state, [batch])).tolist() == [
        sample == 2 for sample in range(8)
    ]


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"weights": np.resize([1, -2], 8)}, r"weights is -2.0 in sample 1 \(4 of 8 samples"),
        ({"weights": np.resize([1, np.inf], 8)}, "weights is inf in sample 1"),
        ({"labels": {"a": np.full(8, np.nan)}}, r"labels\['a'\] is nan in sample 0"),
        ({"labels": np.full(8, -np.inf)}, "set on_bad_sample='drop' .* or 'skip'"),
    ],
    ids=["negative", "infinite", "task", "policies"],
)
def test_bad_samples_are_named(trainer, columns, text):
    with pytest.raises(ValueError, match=text):
        trainer.pack(changed(BATCHES[0], **columns))


def test_a_batch_of_bad_samples_only_is_skipped():
    trainer = trainer_of(on_bad_sample="drop")
    state = trainer.init(jax.random.key(0))
    same, outcome = trainer.step(state, changed(BATCHES[0], labels=np.full(8, np.nan)))
    assert same is state
    assert outcome == {"skipped": True}


def infinite_loss(logits, labels):
    return optax.sigmoid_binary_cross_entropy(logits, labels) / jnp.where(labels > 1, 0.0, 1.0)


def test_a_step_that_is_not_finite_is_an_error_or_skipped():
    bad = changed(BATCHES[1], labels=np.resize([2.0, 0.0], 8))
    data = [BATCHES[0], bad, BATCHES[2]]
    text = (
        r"step 1: loss or gradients are not finite \(loss (inf|-inf|nan)\) although the input is; "
        r"the step changed nothing. Lower the learning rates, or set on_bad_sample='skip'"
    )
    with pytest.raises(FloatingPointError, match=text):
        trainer_of(loss=infinite_loss).fit(data, epochs=1, progress=False)
    skipping = trainer_of(loss=infinite_loss, on_bad_sample="skip")
    result = skipping.fit(data, epochs=1, progress=False)
    assert [(row["step"], row["skipped_batches"]) for row in result.history] == [(2, 1)]
    without = skipping.fit([data[0], data[2]], epochs=1, progress=False)
    assert_trees_equal(result.state, without.state)


# ---- refusals ---------------------------------------------------------------------------------


class Column(nnx.Module):
    """Forgets to squeeze its logits."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(1))

    def __call__(self, acts, dense, train):
        return acts["one"][:, :1] + self.scale[...].reshape(1, 1)


def test_shapes_that_would_broadcast_are_refused():
    text = r"the model's logits must have shape \[b\], one a sample: expected \[2\], got \[2, 1\]"
    column = trainer_of(model=Column())
    with pytest.raises(ValueError, match=text):
        column.step(column.init(jax.random.key(0)), BATCHES[0])
    mean = trainer_of(loss=lambda x, y: optax.sigmoid_binary_cross_entropy(x, y).mean())
    text = (
        r"the loss must have shape \[b\], one a sample: .* got \[\]; leave the mean to the trainer"
    )
    with pytest.raises(ValueError, match=text):
        mean.step(mean.init(jax.random.key(0)), BATCHES[0])


def test_tasks_of_model_and_labels_must_agree(trainer):
    state = trainer.init(jax.random.key(0))
    text = r"the model returns logits for one unnamed task, labels are for the tasks \['a'\]"
    with pytest.raises(ValueError, match=text):
        trainer.step(state, changed(BATCHES[0], labels={"a": np.ones(8)}))
    two = trainer_of(model=TwoTasks())
    text = r"for the tasks \['buy', 'click'\], labels are for the tasks \['buy'\]"
    with pytest.raises(ValueError, match=text):
        two.step(two.init(jax.random.key(0)), changed(BATCHES[0], labels={"buy": np.ones(8)}))
    with pytest.raises(ValueError, match="labels are for one unnamed task"):
        two.evaluate(two.init(jax.random.key(0)), BATCHES)
    assert not state.embeddings.slabs[0].is_deleted()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "fit: give steps or epochs, got steps=None, epochs=None"),
        ({"steps": 1, "epochs": 1}, "fit: give steps or epochs, got steps=1, epochs=1"),
        ({"epochs": -1}, "fit: epochs must be an int of at least 1, got -1"),
        ({"steps": 1, "log_every": 0}, "fit: log_every must be an int of at least 1, got 0"),
        ({"steps": 1, "eval_every": 0}, "fit: eval_every must be an int of at least 1, got 0"),
    ],
)
def test_arguments_of_fit(trainer, options, text):
    with pytest.raises(ValueError, match=text):
        trainer.fit(BATCHES, progress=False, **options)


def test_a_dataset_that_makes_no_step(trainer):
    with pytest.raises(ValueError, match="fit: a pass over the dataset made no step; is it empty"):
        trainer.fit([], steps=1, progress=False)
    with pytest.raises(ValueError, match="the batch has no samples; leave empty batches out"):
        trainer.fit([BATCHES[0].take([])], steps=1, progress=False)


def test_other_refusals(trainer):
    text = r"Trainer: on_bad_sample must be one of \('error', 'skip', 'drop'\), got 'ignore'"
    with pytest.raises(ValueError, match=text):
        trainer_of(on_bad_sample="ignore")
    batch = changed(BATCHES[0])
    batch.features["one"], batch.features["bag"] = np.zeros(7, int), js.Ragged.from_lists([[]] * 7)
    with pytest.raises(ValueError, match="features have 7 samples, labels 8: they must agree"):
        pack_batch(trainer.emb, batch, None)


def test_what_is_no_optimizer_and_no_dataset(trainer):
    with pytest.raises(TypeError, match=r"must be an optax transformation such as .*got 'adam'"):
        js.Trainer(None, trainer.emb, optimizer="adam")
    with pytest.raises(TypeError, match="expected a dataset, got a dict of columns; make one of"):
        trainer.fit({"f": [1], "label": [0]}, epochs=1)
