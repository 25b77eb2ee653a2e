# SPDX-License-Identifier: Apache-2.0
"""The generated click log: reproducible, of known truth, and neither too easy nor too hard."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxsparse.data import planted, synthetic
from jaxsparse.data.synthetic import (
    BLOCK_ROWS,
    DEFAULT_FIELDS,
    SyntheticConfig,
    SyntheticField,
    synthetic_click_log,
)
from jaxsparse.ragged import Ragged

NUM_EVAL_ROWS = 200_000


def rank_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """AUC by midranks, in float64."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    midranks = np.cumsum(counts) - (counts - 1) / 2
    positives = float(labels.sum())
    rank_sum = float(midranks[inverse][labels > 0].sum())
    negatives = len(labels) - positives
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def assert_same_columns(got: synthetic.Columns, want: synthetic.Columns) -> None:
    assert list(got) == list(want)
    for name, column in want.items():
        other = got[name]
        if isinstance(column, Ragged):
            assert isinstance(other, Ragged)
            np.testing.assert_array_equal(other.values, column.values)
            np.testing.assert_array_equal(other.row_splits, column.row_splits)
        else:
            np.testing.assert_array_equal(other, column)


@pytest.fixture(scope="module", params=[0, 1])
def eval_rows(request: pytest.FixtureRequest) -> tuple[int, synthetic.Columns, np.ndarray]:
    return request.param, *synthetic_click_log(NUM_EVAL_ROWS, request.param, split="eval")


def test_columns_have_the_documented_names_dtypes_and_ranges() -> None:
    columns, probability = synthetic_click_log(1000, seed=3)
    names = [field.name for field in DEFAULT_FIELDS]
    assert list(columns) == [*names, *SyntheticConfig().dense_names, "label"]
    for field in DEFAULT_FIELDS:
        column = columns[field.name]
        keys = column.values if isinstance(column, Ragged) else column
        assert len(column) == 1000
        assert keys.dtype == np.int64
        assert keys.min() >= 0
        assert keys.max() < field.vocabulary_size
    assert columns["dense_0"].dtype == np.float32
    assert set(np.unique(columns["label"])) == {0.0, 1.0}
    assert probability.dtype == np.float64
    assert 0.02 <= probability.min() <= probability.max() <= 0.98


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_row_does_not_depend_on_how_many_are_asked_for(split: synthetic.Split) -> None:
    long, long_probability = synthetic_click_log(BLOCK_ROWS + 500, seed=5, split=split)
    for count in (1, 700, BLOCK_ROWS, BLOCK_ROWS + 3):
        short, probability = synthetic_click_log(count, seed=5, split=split)
        cut = {
            name: column.slice(0, count) if isinstance(column, Ragged) else column[:count]
            for name, column in long.items()
        }
        assert_same_columns(short, cut)
        np.testing.assert_array_equal(probability, long_probability[:count])


def test_seeds_and_blocks_differ() -> None:
    columns, _ = synthetic_click_log(2 * BLOCK_ROWS, seed=0)
    other, _ = synthetic_click_log(BLOCK_ROWS, seed=1)
    dense = columns["dense_0"]
    assert not np.array_equal(dense[:BLOCK_ROWS], dense[BLOCK_ROWS:])
    assert not np.array_equal(dense[:BLOCK_ROWS], other["dense_0"])


def test_train_and_eval_rows_are_disjoint_and_share_the_truth() -> None:
    train, _ = synthetic_click_log(100_000, seed=0)
    held_out, _ = synthetic_click_log(50_000, seed=0, split="eval")
    names = SyntheticConfig().dense_names

    def rows(columns: synthetic.Columns) -> set[bytes]:
        return {row.tobytes() for row in np.stack([columns[name] for name in names], axis=1)}

    assert not rows(train) & rows(held_out)
    # The same heavy keys have the same click rates in both.
    for key in np.bincount(train["country"]).argsort()[-3:]:
        rates = [float(c["label"][c["country"] == key].mean()) for c in (train, held_out)]
        assert rates[0] == pytest.approx(rates[1], abs=0.02)


def test_probabilities_are_those_the_labels_were_drawn_with(
    eval_rows: tuple[int, synthetic.Columns, np.ndarray],
) -> None:
    _, columns, probability = eval_rows
    order = np.argsort(probability)
    for part in np.array_split(order, 10):
        expected = float(probability[part].mean())
        error = 4.5 * np.sqrt(expected * (1 - expected) / len(part))
        assert columns["label"][part].mean() == pytest.approx(expected, abs=error)


def test_the_best_reachable_auc_is_high_enough(
    eval_rows: tuple[int, synthetic.Columns, np.ndarray],
) -> None:
    _, columns, probability = eval_rows
    assert 0.78 <= rank_auc(columns["label"], probability) <= 0.9
    assert 0.2 <= columns["label"].mean() <= 0.4


def test_no_model_of_the_dense_columns_alone_comes_near(
    eval_rows: tuple[int, synthetic.Columns, np.ndarray],
) -> None:
    """The dense part of the logit, independent of the rest, is the best score they allow."""
    seed, columns, probability = eval_rows
    thresholds = synthetic._plant(SyntheticConfig(), seed).terms.dense_thresholds
    score = sum(
        planted.ramp(columns[f"dense_{i}"], middle, planted.DENSE_RAMP)
        for i, middle in enumerate(thresholds)
    )
    gap = rank_auc(columns["label"], probability) - rank_auc(columns["label"], score)
    assert gap >= 0.16


def field_effects(
    train: synthetic.Columns, labels: np.ndarray, rows: synthetic.Columns, hashed: bool
) -> np.ndarray:
    """Sum over single-key fields of the log odds of each key, or of 1 % as many buckets."""
    score = np.zeros(len(rows["label"]))
    for field in DEFAULT_FIELDS:
        if field.mean_length is not None:
            continue
        size = max(1, field.vocabulary_size // 100) if hashed else field.vocabulary_size
        mix = np.random.default_rng(1).integers(0, size, field.vocabulary_size)
        address = mix if hashed else np.arange(field.vocabulary_size)
        rows_of = address[train[field.name]]
        clicks = np.bincount(rows_of, labels, size) + 1
        others = np.bincount(rows_of, 1 - labels, size) + 2
        score += np.log(clicks / others)[address[rows[field.name]]]
    return score


def test_tables_of_one_percent_of_the_rows_lose_what_keys_know() -> None:
    train, _ = synthetic_click_log(300_000, seed=0)
    rows, probability = synthetic_click_log(NUM_EVAL_ROWS, seed=0, split="eval")
    best = rank_auc(rows["label"], probability)
    auc = {
        hashed: rank_auc(rows["label"], field_effects(train, train["label"], rows, hashed))
        for hashed in (False, True)
    }
    assert auc[True] <= best - 0.1
    assert auc[False] >= auc[True] + 0.1


def test_keys_are_zipf_like_and_tails_are_seen() -> None:
    columns, _ = synthetic_click_log(500_000, seed=0)
    for field in DEFAULT_FIELDS:
        column = columns[field.name]
        keys = column.values if isinstance(column, Ragged) else column
        counts = np.sort(np.bincount(keys, minlength=field.vocabulary_size))[::-1]
        # The r-th key has the mass of x**-exponent over [r, r + 1).
        mass = np.diff(np.array([5.0, 9.0, 17.0]) ** (1 - field.exponent))
        assert counts[4:8].sum() / counts[8:16].sum() == pytest.approx(mass[0] / mass[1], rel=0.05)
        assert (counts > 0).mean() > 0.6


def test_bags_have_every_length_up_to_twice_the_mean() -> None:
    columns, _ = synthetic_click_log(20_000, seed=0)
    lengths = columns["clicked"].lengths
    shares = np.bincount(lengths) / len(lengths)
    np.testing.assert_allclose(shares, np.full(7, 1 / 7), atol=0.015)


def test_the_truth_is_not_additive() -> None:
    """What the device changes depends on the country."""
    terms = synthetic._plant(SyntheticConfig(), 0).terms
    corners = np.array([[0.9, 0.9], [0.9, 0.3], [0.3, 0.9], [0.3, 0.3]], np.float32)
    levels = [np.full(4, 0.5, np.float32) for _ in DEFAULT_FIELDS]
    levels[0], levels[1] = corners[:, 0], corners[:, 1]
    logit = terms.logit(levels, np.zeros((4, 5), np.float32))
    assert abs(logit @ np.array([1, -1, -1, 1])) > 0.25


def test_a_soft_threshold_of_a_bag_is_a_threshold() -> None:
    levels = np.array([0.0, 0.2, 0.5, 0.8, 1.0], np.float32)
    np.testing.assert_allclose(
        planted.ramp(levels, 0.5, planted.BAG_RAMP), [0, 0, 0.5, 1, 1], atol=1e-6
    )


def test_a_config_of_ones_own() -> None:
    field = SyntheticField(name="a", vocabulary_size=7, exponent=0.0)
    config = SyntheticConfig(fields=(field,), products=(), num_dense=0, label_noise=0.0)
    columns, probability = synthetic_click_log(50, config=config)
    assert list(columns) == ["a", "label"]
    assert len(np.unique(probability)) == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"fields": ()}, r"fields must have unique names, got \[\]"),
        ({"products": (("a", "country"),)}, "products name 'a', not among fields"),
        ({"num_dense": -1}, "num_dense must be >= 0, got -1"),
        ({"label_noise": 0.5}, r"label_noise must be in \[0, .5\), got 0.5"),
    ],
)
def test_config_errors(change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(SyntheticConfig(), **change)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"vocabulary_size": 0}, "'a': vocabulary_size must be >= 1, got 0"),
        ({"exponent": 1.0}, "'a': exponent must be >= 0 and not 1, got 1.0"),
        ({"mean_length": 0}, "'a': mean_length must be None or >= 1, got 0"),
    ],
)
def test_field_errors(change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(SyntheticField(name="a", vocabulary_size=3), **change)


def test_argument_errors() -> None:
    with pytest.raises(ValueError, match="num_rows must be >= 1 and seed >= 0, got 0 and 0"):
        synthetic_click_log(0)
    with pytest.raises(ValueError, match=r"split must be one of \('train', 'eval'\), got 'test'"):
        synthetic_click_log(5, split="test")
