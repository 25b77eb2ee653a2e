# SPDX-License-Identifier: Apache-2.0
"""Metrics against pair counting and Python's own float arithmetic."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsparse.train import metrics as metrics_module
from jaxsparse.train.metrics import BinaryMetrics, StreamingAUC

SAMPLES = st.lists(
    st.tuples(
        st.sampled_from([-40.0, -3.0, -0.5, 0.0, 0.25, 2.0, 41.0]) | st.floats(-20, 20, width=32),
        st.integers(0, 1),
        st.sampled_from([0.0, 0.25, 1.0, 3.0]),
    ),
    max_size=40,
)


def auc_by_pairs(scores: Any, labels: Any, weights: Any) -> float:
    """Weighted share of ordered pairs, ties one half."""
    good = total = 0.0
    for s, y, w in zip(scores, labels, weights, strict=True):
        for t, z, v in zip(scores, labels, weights, strict=True):
            if y == 1 and z == 0:
                good += w * v * ((s > t) + 0.5 * (s == t))
                total += w * v
    return good / total if total else math.nan


def auc_by_midranks(scores: np.ndarray, labels: np.ndarray) -> float:
    """The rank-sum formula, with Python integers (twice the midranks)."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    twice_midrank = (2 * last - counts + 1)[inverse]
    rank_sum = sum(map(int, twice_midrank[labels == 1]))
    num_pos = int(labels.sum())
    num_neg = len(labels) - num_pos
    return (rank_sum - num_pos * (num_pos + 1)) / (2 * num_pos * num_neg)


def in_batches(metric: Any, columns: tuple[Any, ...], cuts: list[int]) -> Any:
    """Feeds columns to ``metric``, cut at the given places."""
    borders = [0, *sorted(cuts), len(columns[0])]
    for begin, end in itertools.pairwise(borders):
        metric.update(*(column[begin:end] for column in columns))
    return metric


def assert_same(got: dict[str, float], want: dict[str, float], rtol: float = 1e-12) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        # Losses of 1e-18 are below what a probability near 1 can tell.
        np.testing.assert_allclose(got[name], value, rtol=rtol, atol=1e-15, err_msg=name)


# ---------------------------------------------------------------- AUC


@settings(deadline=None)
@given(SAMPLES, st.lists(st.integers(0, 40), max_size=4), st.integers(1, 9))
def test_auc_is_the_share_of_pairs_over_any_split(
    samples: list[tuple[float, int, float]], cuts: list[int], pending_limit: int
) -> None:
    scores, labels, weights = (np.array([s[i] for s in samples]) for i in range(3))
    want = auc_by_pairs(scores, labels, weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_module, "PENDING_LIMIT", pending_limit)
        got = in_batches(
            StreamingAUC(), (scores, labels, weights), [min(c, len(scores)) for c in cuts]
        )
        np.testing.assert_allclose(got.result(), want, rtol=1e-12, atol=1e-15)
        assert got.num_distinct_scores == len(np.unique(scores[weights > 0]))


@pytest.mark.parametrize("logits", [False, True])
def test_g01_scores_crowded_near_zero(logits: bool) -> None:
    rng = np.random.default_rng(0)
    low, high = (-9.0, -7.0) if logits else (1e-4, 1e-3)
    scores = rng.uniform(low, high, 10_000).astype(np.float32)
    labels = (rng.uniform(low, high, 10_000) < scores).astype(np.int32)
    got = in_batches(StreamingAUC(), (scores, labels), list(range(0, 10_000, 700)))
    # Documented: exact, far inside the 1e-3 of threshold methods.
    assert got.result() == pytest.approx(auc_by_midranks(scores, labels), abs=1e-12)
    assert 0.6 < got.result() < 0.95


def test_g02_ties_do_not_depend_on_order() -> None:
    auc = StreamingAUC()
    auc.update(np.full(4, 0.5), [0, 1, 0, 1])
    assert auc.result() == 0.5
    scores, labels = np.array([1, 1, 2, 2, 3, 3, 3]), np.array([0, 1, 0, 1, 1, 1, 0])
    rng = np.random.default_rng(0)
    for _ in range(5):
        order = rng.permutation(7)
        auc = StreamingAUC()
        auc.update(scores[order], labels[order])
        assert auc.result() == auc_by_midranks(scores, labels)
    auc = StreamingAUC()
    auc.update([0.0, -0.0], [0, 1])
    assert auc.result() == 0.5


def test_g03_one_class_is_undefined_until_the_other_comes() -> None:
    for first in (0, 1):
        metrics = BinaryMetrics()
        metrics.update([0.5, 1.5], [first, first])
        result = metrics.result()
        assert math.isnan(result["auc"])
        assert math.isnan(result["ne"])
        assert math.isnan(result["calibration"]) == (first == 0)
        assert math.isfinite(result["logloss"])
        metrics.update([1.0], [1 - first])
        assert metrics.result()["auc"] == 0.5
        assert math.isfinite(metrics.result()["ne"])


def test_g07_many_pairs_do_not_overflow() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=120_000).astype(np.float32)
    labels = (np.arange(120_000) % 2).astype(np.int32)
    scores[labels == 1] += np.float32(0.5)
    got = in_batches(StreamingAUC(), (scores, labels), list(range(0, 120_000, 9_999)))
    assert got.result() == pytest.approx(auc_by_midranks(scores, labels), abs=1e-12)
    huge = StreamingAUC()
    huge.update([1.0, 2.0, 2.0], [0, 1, 0], [1e200, 1e200, 1e200])
    assert huge.result() == 0.75


def test_memory_is_bounded_by_distinct_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "PENDING_LIMIT", 100)
    auc = StreamingAUC()
    for step in range(200):
        auc.update(np.arange(50) % 7, (np.arange(50) + step) % 2)
        assert sum(part.size for part in auc._pending) <= 3 * 150
    assert auc.num_distinct_scores == 7


def test_separated_classes_reach_the_ends() -> None:
    auc = StreamingAUC()
    auc.update(np.arange(1000) / 7, np.arange(1000) >= 300, np.full(1000, 0.1))
    assert auc.result() == pytest.approx(1.0, abs=1e-14)
    assert auc.result() <= 1.0


# ---------------------------------------------------------------- all metrics


@settings(deadline=None)
@given(SAMPLES, st.integers(0, 40), st.booleans())
def test_metrics_against_python_floats(
    samples: list[tuple[float, int, float]], cut: int, from_logits: bool
) -> None:
    probability = {s: 1 / (1 + math.exp(-s)) for s, _, _ in samples}
    loss = weight = clicks = predicted = 0.0
    for s, y, w in samples:
        z = s if y else -s
        loss += w * (math.log1p(math.exp(-z)) if z > 0 else -z + math.log1p(math.exp(z)))
        weight, clicks, predicted = weight + w, clicks + w * y, predicted + w * probability[s]
    rate = clicks / weight if weight else 0.0
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate) if 0 < rate < 1 else 0.0
    scores, labels, weights = (np.array([s[i] for s in samples]) for i in range(3))
    if not from_logits:
        scores = np.array([probability[s] for s in scores.tolist()])
        if ((scores == 1) & (labels == 0) & (weights > 0)).any():
            return  # the loss is inf: its own test
    got = in_batches(
        BinaryMetrics(from_logits=from_logits), (scores, labels, weights), [min(cut, len(samples))]
    )
    want = {
        "auc": auc_by_pairs(scores, labels, weights),
        "logloss": loss / weight if weight else math.nan,
        "ne": loss / weight / entropy if entropy else math.nan,
        "calibration": predicted / clicks if clicks else math.nan,
        "num_samples": int((weights > 0).sum()),
    }
    # Probabilities near 1 have lost digits of 1 - p before they come in.
    assert_same(got.result(), want, rtol=1e-12 if from_logits else 1e-6)
    assert isinstance(got.result()["num_samples"], int)


def test_worked_numbers() -> None:
    metrics = BinaryMetrics(from_logits=False)
    metrics.update([0.2, 0.4, 0.9], [0, 0, 1])
    loss = -(math.log(0.8) + math.log(0.6) + math.log(0.9)) / 3
    entropy = math.log(3) - 2 / 3 * math.log(2)
    want = {
        "auc": 1.0, "logloss": loss, "ne": loss / entropy, "calibration": 1.5, "num_samples": 3
    }  # fmt: skip
    assert_same(metrics.result(), want)


@pytest.mark.parametrize("from_logits", [True, False])
def test_g06_one_by_one_equals_one_call(from_logits: bool) -> None:
    scores = np.array([1.2, 0.9678, 1.7]) * (1 if from_logits else 0.5)
    labels = np.array([0, 1, 1])
    together, singly = BinaryMetrics(from_logits), BinaryMetrics(from_logits)
    together.update(scores, labels)
    for score, label in zip(scores, labels, strict=True):
        singly.update([score], [label])
    assert_same(singly.result(), together.result(), rtol=1e-15)
    inside_zero_one = BinaryMetrics()
    inside_zero_one.update([0.0, 0.0], [0, 1])
    assert inside_zero_one.result()["logloss"] == pytest.approx(math.log(2))


def test_g05_padding_does_not_count() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=21).astype(np.float32), rng.integers(0, 2, 21)
    plain = BinaryMetrics()
    plain.update(scores, labels)
    padded = BinaryMetrics()
    for begin in range(0, 21, 4):
        batch_scores, batch_labels = np.full(4, np.nan, np.float32), np.full(4, -1)
        weights = np.zeros(4)
        count = min(4, 21 - begin)
        batch_scores[:count] = scores[begin : begin + count]
        batch_labels[:count] = labels[begin : begin + count]
        weights[:count] = 1
        padded.update(batch_scores, batch_labels, weights)
    assert padded.result()["num_samples"] == 21
    assert_same(padded.result(), plain.result(), rtol=1e-14)


def test_no_samples() -> None:
    metrics = BinaryMetrics()
    metrics.update([], [])
    metrics.update([1.0], [1], [0.0])
    result = metrics.result()
    assert result.pop("num_samples") == 0
    assert all(math.isnan(value) for value in result.values())


def test_merge_equals_one_stream() -> None:
    rng = np.random.default_rng(1)
    scores = rng.integers(-5, 5, 300).astype(np.float32)
    labels = rng.integers(0, 2, 300)
    weights = rng.integers(0, 3, 300)
    whole = BinaryMetrics()
    whole.update(scores, labels, weights)
    parts = [BinaryMetrics() for _ in range(3)]
    for i, part in enumerate(parts):
        part.update(scores[i::3], labels[i::3], weights[i::3])
    before = parts[1].result()
    parts[0].merge(parts[1])
    parts[0].merge(parts[2])
    parts[0].merge(BinaryMetrics())
    assert_same(parts[0].result(), whole.result())
    assert_same(parts[1].result(), before, rtol=0)
    with pytest.raises(ValueError, match="cannot merge metrics of logits with metrics of prob"):
        whole.merge(BinaryMetrics(from_logits=False))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_jax_arrays_and_small_floats(dtype: Any) -> None:
    scores = jnp.asarray([-1.0, 0.5, 2.0], dtype)
    metrics = BinaryMetrics()
    metrics.update(scores, jnp.asarray([0, 1, 1]), jnp.ones(3))
    want = BinaryMetrics()
    want.update([-1.0, 0.5, 2.0], [0, 1, 1])
    assert_same(metrics.result(), want.result(), rtol=0)


def test_extreme_predictions() -> None:
    metrics = BinaryMetrics()
    metrics.update(np.array([-1000, 1000], np.float32), [1, 0])
    assert metrics.result()["logloss"] == 1000
    metrics = BinaryMetrics()
    metrics.update([np.inf, -np.inf], [1, 0])
    assert metrics.result()["logloss"] == 0
    assert metrics.result()["auc"] == 1
    metrics = BinaryMetrics(from_logits=False)
    metrics.update([0.0, 1.0, 0.0], [0, 1, 1])
    assert metrics.result()["logloss"] == math.inf


def test_a_nan_prediction_is_not_hidden() -> None:
    for from_logits in (True, False):
        metrics = BinaryMetrics(from_logits)
        metrics.update([0.25, np.nan, 0.5, np.nan], [0, 1, 1, 0])
        result = metrics.result()
        assert result["num_samples"] == 4
        assert all(math.isnan(result[name]) for name in ("auc", "logloss", "ne", "calibration"))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([0.5, 0.5], [0, 2]), r"a label must be 0 or 1, got 2 at position 1"),
        (([0.5], [math.nan]), r"a label must be 0 or 1, got nan at position 0"),
        (([0.5], [0.5]), r"a label must be 0 or 1, got 0\.5 at position 0"),
        (([0.5], [1], [-1]), r"a weight must be finite and not negative, got -1 at position 0"),
        (([0.5], [1], [math.nan]), r"a weight must be finite and not negative, got nan"),
        (([0.5], [1], [math.inf]), r"a weight must be finite and not negative, got inf"),
        (([[0.5], [0.5]], [0, 1]), r"one shape \[B\], got \(2, 1\), \(2,\) and \(2, 1\)"),
        (([0.5, 0.5], [0, 1], [1]), r"one shape \[B\], got \(2,\), \(2,\) and \(1,\)"),
        (([0.5, 1.25], [0, 1]), r"a prediction must be in \[0, 1\], got 1\.25 at position 1"),
        (([7, -0.5], [0, 0], [0, 1]), r"a prediction must be in \[0, 1\], got -0\.5 at position 1"),
    ],
)
def test_refusals_change_nothing(arguments: tuple[Any, ...], text: str) -> None:
    metrics = BinaryMetrics(from_logits=False)
    metrics.update([0.25, 0.75], [0, 1])
    before = metrics.result()
    with pytest.raises(ValueError, match=text):
        metrics.update(*arguments)
    assert metrics.result() == before
