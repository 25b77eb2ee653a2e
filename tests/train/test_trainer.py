# SPDX-License-Identifier: Apache-2.0
"""The trainer: what a step computes, what the loop does, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxsparse as js
from jaxsparse.testing import assert_trees_equal, count_compiles
from jaxsparse.train.batches import pack_batch
from jaxsparse.train.report import Window
from jaxsparse.train.result import PANELS
from tests.field_cases.layers import mesh_of, table, table_rows
from tests.field_cases.networks import KEEP_GRADS, Tanh, assert_close, tanh_oracle

FEATURES = (
    js.FeatureSpec("one", table(optimizer=js.Adagrad(0.1))),
    js.FeatureSpec("bag", table("u", optimizer=js.Adagrad(0.1)), combiner="mean"),
)
OPTIMIZER = optax.adam(0.05)


def collection(devices, features=FEATURES):
    return js.EmbeddingCollection(features, mesh=mesh_of(devices))


def trainer_of(devices=4, *, model=None, optimizer=OPTIMIZER, features=FEATURES, **options):
    model = Tanh(inputs=5) if model is None else model
    return js.Trainer(model, collection(devices, features), optimizer=optimizer, **options)


@functools.cache
def batch_of(seed, size=8, **columns):
    """A batch whose bags add up to as many ids each time, so that all share one program."""
    rng = np.random.default_rng(seed)
    lengths = np.resize([2, 0, 1], size)
    bags = js.Ragged.from_lengths(rng.integers(0, 10, lengths.sum()), lengths)
    one = rng.integers(0, 10, size)
    dense = rng.normal(size=(size, 1))
    return js.Batch({"one": one, "bag": bags}, dense, one % 2, **columns)


def changed(batch, **columns):
    return dataclasses.replace(batch, **columns)


class Recorder:
    """Remembers events, and stops at a step."""

    def __init__(self, stop_at=None):
        self.stop_at, self.events = stop_at, []

    def __call__(self, event):
        self.events.append((event.kind, event.step))
        assert int(event.state.step) == event.step
        return event.step == self.stop_at


BATCHES = [batch_of(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def trainer():
    return trainer_of()


# ---- a step -----------------------------------------------------------------------------------


def test_step_takes_a_raw_or_a_packed_batch_and_donates_the_state(trainer):
    raw, raw_outcome = trainer.step(trainer.init(jax.random.key(0)), BATCHES[0])
    state = trainer.init(jax.random.key(0))
    packed = trainer.pack(BATCHES[0])
    assert packed.num_samples == 8
    new, outcome = trainer.step(state, packed)
    assert_trees_equal(new, raw)
    assert float(outcome["loss"]) == float(raw_outcome["loss"])
    assert bool(outcome["finite"])
    assert int(new.step) == 1
    assert state.embeddings.slabs[0].is_deleted()


@pytest.mark.parametrize("devices", [1, 4, 8], ids=lambda n: f"mesh{n}")
def test_loss_and_dense_gradients_are_the_weighted_mean_of_the_oracle(devices):
    trainer = trainer_of(devices, optimizer=KEEP_GRADS)
    rng = np.random.default_rng(1)
    weights = rng.uniform(0.5, 2, 13).astype(np.float32)
    weights[4] = 0
    batch = changed(batch_of(5, 13), weights=weights)
    state = trainer.init(jax.random.key(0))
    one, bag = table_rows(trainer, state, "t"), table_rows(trainer, state, "u")
    x = np.zeros((13, 5))
    x[:, :2], x[:, 4] = one[batch.features["one"]], batch.dense[:, 0]
    for sample, keys in enumerate(batch.features["bag"]):
        for key in keys:
            x[sample, 2:4] += bag[key].astype(np.float64) / len(keys)
    loss, logits, grads, _ = tanh_oracle(Tanh(inputs=5), x, batch.labels, weights)

    metrics = trainer.evaluate(state, [batch])
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["num_samples"] == 12
    state, outcome = trainer.step(state, batch)
    assert float(outcome["loss"]) == pytest.approx(loss, rel=1e-6)
    assert_close(np.asarray(outcome["logits"])[:13], logits)
    for name, want in grads.items():
        assert_close(getattr(state.opt_state, name)[...], want)


def test_reduce_grads_decides_what_the_dense_optimizer_sees():
    def halved_sum(grads, axes):
        return jax.tree.map(lambda g: g / 2, js.sum_grads(grads, axes))

    grads = []
    for reduce_grads in (js.sum_grads, halved_sum):
        trainer = trainer_of(optimizer=KEEP_GRADS, reduce_grads=reduce_grads)
        state, _ = trainer.step(trainer.init(jax.random.key(0)), BATCHES[0])
        grads.append(state.opt_state)
    halves = jax.tree.map(lambda g: g / 2, grads[0])
    assert_trees_equal(grads[1], halves)
    assert np.abs(np.asarray(grads[0].out[...])).min() > 0


class InOrder(nnx.Module):
    """Goes through the activations in the order they come."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(1))

    def __call__(self, acts, dense, train):
        weighted = [(i + 1) * act[:, 0] for i, act in enumerate(acts.values())]
        return self.scale[...] * sum(weighted)


def test_features_come_in_declared_order_in_training_and_in_evaluation():
    features = [
        js.FeatureSpec(name, table(name, dim=1, initializer=js.constant(value)))
        for name, value in (("zebra", 1.0), ("ant", 10.0))
    ]
    trainer = trainer_of(model=InOrder(), features=features, link=lambda x: x)
    state = trainer.init(jax.random.key(0))
    batch = js.Batch({"zebra": np.array([1]), "ant": np.array([2])}, labels=[1])
    assert trainer.predict(state, [batch]).tolist() == [21.0]
    acts, _ = trainer.emb.lookup(state.embeddings, trainer.emb.pack(batch.features))
    assert list(acts) == ["zebra", "ant"]
    _, outcome = trainer.step(state, batch)
    assert float(outcome["logits"][0]) == 21.0


class TwoTasks(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(1))

    def __call__(self, acts, dense, train):
        logit = self.scale[...] * dense[:, 0]
        return {"click": logit + 0 * acts["one"][:, 0], "buy": logit - 1.0}


def test_several_tasks_add_their_losses_and_have_metrics_of_their_own():
    trainer = trainer_of(model=TwoTasks())
    batch = batch_of(1)
    labels = {"click": batch.labels, "buy": np.resize([0, 1, 1], 8)}
    batch = changed(batch, labels=labels)
    logits = {"click": batch.dense[:, 0].astype(np.float64)}
    logits["buy"] = logits["click"] - 1
    want = {}
    for task, values in logits.items():
        want[task] = np.logaddexp(0, np.where(batch.labels[task] == 1, -values, values)).mean()
    result = trainer.fit([batch], steps=1, eval_dataset=[batch], progress=False)
    train, evaluated = result.history
    assert train["loss"] == pytest.approx(sum(want.values()), rel=1e-6)
    assert "auc" not in train
    assert {f"{task}/auc" for task in labels} < set(evaluated)
    state = trainer.init(jax.random.key(0))
    metrics = trainer.evaluate(state, [batch, batch])
    for task in labels:
        assert metrics[f"{task}/logloss"] == pytest.approx(want[task], rel=1e-6)
    got = trainer.predict(state, [batch, batch])
    assert {task: values.shape for task, values in got.items()} == {"click": (16,), "buy": (16,)}
    assert_close(got["buy"][:8], 1 / (1 + np.exp(-logits["buy"])))


class Noisy(nnx.Module):
    """BatchNorm and Dropout before a linear layer."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(2, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, acts, dense, train):
        x = self.norm(acts["one"], use_running_average=not train)
        return self.out(self.dropout(x, deterministic=not train))[:, 0]


def test_batch_norm_and_dropout_train():
    features = FEATURES[:1]
    trainer = trainer_of(2, model=Noisy(nnx.Rngs(0)), features=features)
    keys = np.arange(8) % 4
    # Both devices have the same samples: in training only dropout tells them apart.
    batch = js.Batch({"one": keys}, labels=keys % 2)
    state = trainer.init(jax.random.key(0))
    before = trainer.evaluate(state, [batch])["loss"]
    assert (
        trainer.predict(state, [batch])[:4].tolist() == trainer.predict(state, [batch])[4:].tolist()
    )
    first_logits = []
    for _ in range(40):
        state, outcome = trainer.step(state, batch)
        first_logits.append(tuple(np.asarray(outcome["logits"]).tolist()))
    assert first_logits[0][:4] != first_logits[0][4:]
    assert len({logits[:4] for logits in first_logits}) > 30
    assert float(state.model_state[1].norm.mean[...][0]) != 0
    assert trainer.evaluate(state, [batch])["loss"] < before

    again, other = (trainer.init(jax.random.key(seed)) for seed in (0, 1))
    other = dataclasses.replace(other, embeddings=trainer.init(jax.random.key(0)).embeddings)
    _, outcome = trainer.step(again, batch)
    assert tuple(np.asarray(outcome["logits"]).tolist()) == first_logits[0]
    _, outcome = trainer.step(other, batch)  # the same tables, other masks
    assert tuple(np.asarray(outcome["logits"]).tolist()) != first_logits[0]


def test_trainers_of_equal_parts_share_programs(trainer):
    trainer.step(trainer.init(jax.random.key(0)), BATCHES[0])
    other = trainer_of()
    state = other.init(jax.random.key(0))
    with count_compiles() as count:
        other.step(state, BATCHES[0])
    assert count.programs == 0


# ---- the loop ---------------------------------------------------------------------------------


def test_fit_counts_global_steps_and_goes_round_the_data(trainer):
    result = trainer.fit(BATCHES, steps=4, log_every=2, progress=False)
    assert int(result.state.step) == 4
    assert [row["step"] for row in result.history] == [2, 4]
    result = trainer.fit(BATCHES, steps=5, state=result.state, progress=False)
    assert int(result.state.step) == 5
    state = trainer.init(jax.random.key(0))
    for batch in [*BATCHES, BATCHES[0], BATCHES[0]]:  # the second call starts anew
        state, _ = trainer.step(state, batch)
    assert_trees_equal(result.state, state)
    assert trainer.fit(BATCHES, steps=5, state=state, progress=False).history == []


def test_fit_by_epochs_reads_any_iterable(trainer):
    class Twice:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(BATCHES[:2])

    data = Twice()
    result = trainer.fit(data, epochs=3, seed=7, progress=False)
    assert (data.passes, int(result.state.step)) == (3, 6)
    state = trainer.init(jax.random.key(7))
    for batch in BATCHES[:2] * 3:
        state, _ = trainer.step(state, batch)
    assert_trees_equal(result.state, state)


def test_rows_of_the_history(trainer, tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    for _ in range(2):
        result = trainer.fit(
            BATCHES,
            steps=4,
            log_every=3,
            eval_dataset=BATCHES[:1],
            metrics_path=path,
            progress=False,
        )
    assert [(row["kind"], row["step"]) for row in result.history] == [
        ("train", 3),
        ("eval", 3),
        ("train", 4),
        ("eval", 4),
    ]
    train, evaluated = result.history[:2]
    state, losses = trainer.init(jax.random.key(0)), []
    for batch in BATCHES:
        state, outcome = trainer.step(state, batch)
        losses.append(float(outcome["loss"]))
    assert train["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert {"auc", "logloss", "samples_per_s", "step_ms_p50", "step_ms_p95"} < set(train)
    assert (train["num_samples"], train["skipped_batches"]) == (24, 0)
    assert train["device_bytes"] > sum(s.nbytes for s in state.embeddings.slabs) / 4
    assert 0 < train["step_ms_p50"] <= train["step_ms_p95"] <= train["step_ms_max"]
    assert evaluated | trainer.evaluate(state, BATCHES[:1]) == evaluated
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 8
    assert lines[4:] == result.history


def test_numbers_json_does_not_have_become_null(trainer, tmp_path):
    one_class = changed(BATCHES[0], labels=np.ones(8))
    path = tmp_path / "metrics.jsonl"
    result = trainer.fit([one_class], steps=1, metrics_path=path, progress=False)
    assert math.isnan(result.history[0]["auc"])
    assert json.loads(path.read_text())["auc"] is None


def test_evaluations_by_steps_and_not_twice_at_the_end(trainer):
    seen = Recorder()
    trainer.fit(
        BATCHES,
        steps=4,
        log_every=3,
        eval_every=2,
        eval_dataset=BATCHES[:1],
        callbacks=[seen],
        progress=False,
    )
    assert seen.events == [("eval", 2), ("log", 3), ("log", 4), ("eval", 4)]


def test_a_callback_can_stop_and_all_are_told(trainer):
    stops, told = Recorder(stop_at=2), Recorder()
    result = trainer.fit(BATCHES, steps=9, log_every=1, callbacks=[stops, told], progress=False)
    assert int(result.state.step) == 2
    assert stops.events == told.events == [("log", 1), ("log", 2)]


def test_keep_best_keeps_a_state_and_loses_patience(trainer):
    best = js.KeepBest("loss", mode="min", patience=2)
    values = iter([3.0, 1.0, 2.0, 1.5, 0.5])
    kept = []

    def scripted(event):
        metrics = {**event.metrics, "loss": next(values)}
        kept.append(jax.tree.map(np.array, event.state.params))
        return best(dataclasses.replace(event, metrics=metrics))

    result = trainer.fit(
        BATCHES,
        steps=9,
        log_every=99,
        eval_every=1,
        eval_dataset=BATCHES[:1],
        callbacks=[lambda event: event.kind == "eval" and scripted(event)],
        progress=False,
    )
    assert int(result.state.step) == 4
    assert (best.step, best.value) == (2, 1.0)
    assert_trees_equal(jax.tree.map(np.array, best.state.params), kept[1])
    assert np.isfinite(trainer.evaluate(best.state, BATCHES)["loss"])


def test_keep_best_needs_a_known_metric_and_mode(trainer):
    with pytest.raises(ValueError, match="KeepBest: mode must be 'max' or 'min', got 'up'"):
        js.KeepBest("auc", mode="up")
    with pytest.raises(ValueError, match=r"KeepBest: no metric 'acc' in the evaluation; it has \["):
        trainer.fit(
            BATCHES,
            steps=1,
            eval_dataset=BATCHES[:1],
            callbacks=[js.KeepBest("acc")],
            progress=False,
        )


def test_plot_draws_and_saves_a_picture(trainer, tmp_path):
    result = trainer.fit(BATCHES, steps=2, log_every=1, eval_dataset=BATCHES[:1], progress=False)
    figure = result.plot(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert [axis.get_title() for axis in figure.axes] == [title for _, title in PANELS]
    assert [len(axis.lines) for axis in figure.axes] == [2, 2, 1]
    final = {"step": 2, "split": "test", "loss": 0.5, "auc": 0.7}
    figure = result.plot(final=final, best_auc=0.9)
    assert [len(axis.lines) for axis in figure.axes] == [3, 4, 1]
    labels = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert labels == ["train", "eval", "test", "best reachable"]


def test_a_result_tells_little_of_much(trainer):
    result = trainer.fit(BATCHES, steps=2, log_every=1, eval_dataset=BATCHES[:1], progress=False)
    assert re.fullmatch(
        r"FitResult\(step 2, 3 rows of history, train loss 0\.\d{4}, train auc 0\.\d{4}, "
        r"eval loss 0\.\d{4}, eval auc 0\.\d{4}\)",
        repr(result),
    )
    rows = [{"kind": "train", "samples_per_s_p50": speed} for speed in (1.0, 9.0, 5.0)]
    assert dataclasses.replace(result, history=rows).samples_per_s == 5.0
    empty = dataclasses.replace(result, history=[], interrupted=True)
    assert math.isnan(empty.samples_per_s)
    assert repr(empty) == "FitResult(step 2, 0 rows of history, interrupted)"


def test_the_median_speed_leaves_out_the_step_that_compiled(trainer):
    window = Window()
    window.step_ms, window.samples = [9000.0, 10.0, 10.0], 600
    row = window.row(3, 0, trainer.emb.mesh)
    assert row["samples_per_s_p50"] == pytest.approx(20_000)
    assert row["samples_per_s"] == pytest.approx(600 / 9.02)


def test_progress_goes_to_stderr(trainer, capsys):
    trainer.fit(BATCHES, steps=1, eval_dataset=BATCHES[:1])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "train step       1/1  loss 0." in captured.err
    assert "eval  step       1/1  loss 0." in captured.err


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


# ---- evaluate and predict ---------------------------------------------------------------------


def test_predict_keeps_order_and_number(trainer):
    state = trainer.init(jax.random.key(0))
    whole = batch_of(9, 21)
    parts = [whole.take(np.arange(start, min(start + 8, 21))) for start in (0, 8, 16)]
    got = trainer.predict(state, parts)
    assert (got.shape, got.dtype) == ((21,), np.float32)
    singly = np.concatenate([trainer.predict(state, [part]) for part in parts[::-1]])
    assert got.tolist() == [*singly[13:], *singly[5:13], *singly[:5]]
    assert len(set(got.tolist())) == 21
    assert trainer.predict(state, []).shape == (0,)


def test_evaluate_leaves_out_batches_without_samples(trainer):
    state = trainer.init(jax.random.key(0))
    empty = BATCHES[0].take([])
    assert trainer.evaluate(state, [empty, BATCHES[0]]) == trainer.evaluate(state, BATCHES[:1])
    with pytest.raises(ValueError, match="evaluate: the dataset has no samples"):
        trainer.evaluate(state, [empty])
    weightless = dataclasses.replace(BATCHES[0], weights=np.zeros(BATCHES[0].num_samples))
    with pytest.raises(ValueError, match=r"evaluate: all \d+ samples have weight 0: there is noth"):
        trainer.evaluate(state, [weightless])


def test_labels_that_are_no_classes_have_a_loss_and_no_auc(trainer):
    state = trainer.init(jax.random.key(0))
    soft = changed(BATCHES[1], labels=np.linspace(0, 1, 8))
    # Also where only some batches have such labels: the AUC of the others is not that of all.
    for data in ([soft], [BATCHES[0], soft], [soft, BATCHES[0]]):
        metrics = trainer.evaluate(state, data)
        assert set(metrics) == {"loss", "num_samples"}
    history = trainer.fit([BATCHES[0], soft], epochs=1, progress=False).history
    assert "auc" not in history[0]
    masked = changed(
        BATCHES[0], labels=np.r_[-1, BATCHES[0].labels[1:]], weights=np.r_[0, np.ones(7)]
    )
    assert trainer.evaluate(state, [masked])["num_samples"] == 7
    assert "auc" in trainer.evaluate(state, [masked])


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
