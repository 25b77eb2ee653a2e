# SPDX-License-Identifier: Apache-2.0
"""Metrics of click models, accumulated over batches in float64 on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Float64s = npt.NDArray[np.float64]

PENDING_LIMIT = 2**18
"""Samples kept before they are merged into distinct scores (6 MiB of float64 triples)."""


class StreamingAUC:
    """Exact area under the ROC curve, whatever the batches were.

    It is the weighted share of (positive, negative) pairs in which the positive scores higher, a
    tie counting one half (Mann and Whitney 1947; the same as midranks). Only distinct scores are
    kept, with the weights of their positives and negatives, so memory grows with their number and
    not with that of the samples: float32 predictions crowded near 0 are told apart where fixed
    thresholds would not.

    >>> auc = StreamingAUC()
    >>> auc.update([0.1, 0.4], [0, 0])
    >>> auc.update([0.35, 0.8], [1, 1])
    >>> auc.result()
    0.75
    """

    def __init__(self) -> None:
        """Starts without samples."""
        self._merged: Float64s = np.zeros((3, 0))  # distinct score, positive, negative weight
        self._pending: list[Float64s] = []
        self._num_pending = 0

    def update(
        self,
        scores: npt.ArrayLike,
        labels: npt.ArrayLike,
        weights: npt.ArrayLike | None = None,
    ) -> None:
        """Adds samples; those of weight 0 do not count, whatever their score and label.

        Args:
            scores: ``[B]`` of any float dtype; only their order matters.
            labels: ``[B]``, each 0 or 1.
            weights: ``[B]``, finite and not negative; None is 1.

        Raises:
            ValueError: shapes differ, a label is not 0 or 1, or a weight is negative or not
                finite; the message names the first such value.
        """
        self.add_checked(*check_samples(scores, labels, weights))

    def add_checked(self, scores: Float64s, labels: Float64s, weights: Float64s) -> None:
        """`update` with what `check_samples` returned."""
        self._pending.append(np.stack([scores, weights * labels, weights * (1 - labels)]))
        self._num_pending += len(scores)
        # Waiting for as many as are merged keeps the cost per sample logarithmic.
        if self._num_pending > max(PENDING_LIMIT, self.num_distinct_scores):
            self._merge_pending()

    def merge(self, other: StreamingAUC) -> None:
        """Adds all samples of ``other``, for example another process's."""
        other._merge_pending()
        self._pending.append(other._merged)
        self._merge_pending()

    def state(self) -> dict[str, Any]:
        """Everything it holds; `restore` brings it back bit for bit."""
        pending = np.concatenate([np.zeros((3, 0)), *self._pending], axis=1)
        return {"merged": self._merged, "pending": pending}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over a `state`."""
        self._merged = state["merged"]
        self._num_pending = state["pending"].shape[1]
        self._pending = [state["pending"]] if self._num_pending else []

    def result(self) -> float:
        """The area in [0, 1]; nan without both classes, or if a score was nan."""
        self._merge_pending()
        scores, positive, negative = self._merged
        num_positive, num_negative = positive.sum(), negative.sum()
        if not num_positive or not num_negative or np.isnan(scores).any():
            return float("nan")
        below = np.cumsum(negative) - negative
        # Shares, not products of totals: nothing overflows or loses digits at 10^9 samples.
        shares = (below + negative / 2) / num_negative
        return float(np.clip((positive / num_positive) @ shares, 0.0, 1.0))

    @property
    def num_distinct_scores(self) -> int:
        """Merged so far: memory is 24 bytes for each, and as much again for pending samples."""
        return len(self._merged[0])

    def _merge_pending(self) -> None:
        if not self._pending:
            return
        samples = np.concatenate([self._merged, *self._pending], axis=1)
        order = np.argsort(samples[0], kind="stable")
        scores = samples[0, order]
        # nans sort last and differ from each other: keep one, it spoils the result alone.
        starts = np.flatnonzero(_differs_from_previous(scores))
        if len(starts):
            sums = np.add.reduceat(samples[1:, order], starts, axis=1)
            self._merged = np.concatenate([scores[None, starts], sums])
        self._pending, self._num_pending = [], 0


class BinaryMetrics:
    """AUC, logloss, normalized entropy and calibration of click predictions.

    >>> metrics = BinaryMetrics(from_logits=False)
    >>> metrics.update([0.5, 0.5], [0, 1])
    >>> {name: round(value, 4) for name, value in metrics.result().items()}
    {'auc': 0.5, 'logloss': 0.6931, 'ne': 1.0, 'calibration': 1.0, 'num_samples': 2}
    """

    def __init__(self, from_logits: bool = True) -> None:
        """Starts without samples.

        Args:
            from_logits: what `update` is given: logits, or probabilities in [0, 1]. Their values
                never decide. Logits are better: float32 probabilities saturate at 1.
        """
        self.from_logits = from_logits
        self._auc = StreamingAUC()
        self._num_samples = 0
        self._sums: Float64s = np.zeros(4)  # of w, w * loss, w * label, w * prediction

    def update(
        self,
        predictions: npt.ArrayLike,
        labels: npt.ArrayLike,
        weights: npt.ArrayLike | None = None,
    ) -> None:
        """Adds samples; those of weight 0 (padding) do not count anywhere.

        Args:
            predictions: ``[B]`` logits or probabilities, as ``from_logits`` says.
            labels: ``[B]``, each 0 or 1.
            weights: ``[B]``, finite and not negative; None is 1.

        Raises:
            ValueError: as `StreamingAUC.update`, or a probability is outside [0, 1].
        """
        bounds = None if self.from_logits else (0.0, 1.0)
        score, label, weight = check_samples(predictions, labels, weights, bounds)
        # A nan prediction makes its metrics nan; one both certain and wrong, its logloss inf.
        with np.errstate(invalid="ignore", divide="ignore"):
            if self.from_logits:
                probability = sigmoid(score)
                # -log of the given class's probability, without ever forming 1 - p.
                loss = np.logaddexp(0, np.where(label == 1, -score, score))
            else:
                probability = score
                loss = np.where(label == 1, -np.log(score), -np.log1p(-score))
        self._auc.add_checked(score, label, weight)
        self._num_samples += len(score)
        columns = np.stack([np.ones_like(loss), loss, label, probability])
        self._sums = self._sums + (columns * weight).sum(axis=1)

    def merge(self, other: BinaryMetrics) -> None:
        """Adds all samples of ``other``.

        Raises:
            ValueError: one was given logits and the other probabilities.
        """
        if self.from_logits != other.from_logits:
            raise ValueError("cannot merge metrics of logits with metrics of probabilities")
        self._auc.merge(other._auc)
        self._num_samples += other._num_samples
        self._sums = self._sums + other._sums

    def state(self) -> dict[str, Any]:
        """Everything it holds; `restore` brings it back bit for bit."""
        return {
            "auc": self._auc.state(),
            "num_samples": self._num_samples,
            "sums": self._sums,
            "from_logits": self.from_logits,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over a `state`."""
        self._auc.restore(state["auc"])
        self._num_samples, self._sums = state["num_samples"], state["sums"]
        self.from_logits = state["from_logits"]

    def result(self) -> dict[str, float]:
        """The metrics of all samples so far; nan where they are undefined.

        Returns:
            ``auc``: see `StreamingAUC`; nan until both classes were seen.
            ``logloss``: weighted mean of -log p(label), in nats; inf for a probability of 0.
            ``ne``: logloss over the entropy of the mean label (normalized entropy, He et al. 2014,
            "Practical lessons from predicting clicks on ads at Facebook"); nan with one class.
            ``calibration``: sum of predictions over sum of labels; nan without positives.
            ``num_samples``: samples of non-zero weight, an int.
        """
        weight, loss, label, prediction = self._sums.tolist()
        nan = float("nan")
        logloss = loss / weight if weight else nan
        entropy = _entropy(label / weight) if weight else 0.0
        return {
            "auc": self._auc.result(),
            "logloss": logloss,
            "ne": logloss / entropy if entropy else nan,
            "calibration": prediction / label if label else nan,
            "num_samples": self._num_samples,
        }


def sigmoid(logits: Float64s) -> Float64s:
    """``1 / (1 + exp(-logits))`` without overflow."""
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1.0, small) / (1.0 + small)


def check_samples(
    scores: npt.ArrayLike,
    labels: npt.ArrayLike,
    weights: npt.ArrayLike | None,
    bounds: tuple[float, float] | None = None,
) -> tuple[Float64s, Float64s, Float64s]:
    """Float64 scores, labels and weights of the samples that count (weight not 0), validated.

    Scores outside ``bounds`` (lowest, highest) are refused; nan scores are not.
    """
    score, label = _float64s(scores), _float64s(labels)
    weight = np.ones(score.shape) if weights is None else _float64s(weights)
    if score.ndim != 1 or not score.shape == label.shape == weight.shape:
        # [B, 1] against [B] would broadcast to [B, B].
        raise ValueError(
            f"predictions, labels and weights must have one shape [B], got {score.shape}, "
            f"{label.shape} and {weight.shape}"
        )
    bad_weight = ~np.isfinite(weight) | (weight < 0)
    _refuse_first("a weight must be finite and not negative", weight, bad_weight)
    counts = weight != 0
    bad_label = counts & (label != 0) & (label != 1)
    _refuse_first("a label must be 0 or 1", label, bad_label)
    if bounds is not None:
        low, high = bounds
        outside = counts & ((score < low) | (score > high))
        _refuse_first(f"a prediction must be in [{low:g}, {high:g}]", score, outside)
    return score[counts], label[counts], weight[counts]


def _float64s(data: Any) -> Float64s:
    return np.asarray(data).astype(np.float64)


def _refuse_first(rule: str, values: Float64s, bad: npt.NDArray[np.bool_]) -> None:
    if bad.any():
        position = int(bad.argmax())
        raise ValueError(f"{rule}, got {values[position]:g} at position {position}")


def _differs_from_previous(scores: Float64s) -> npt.NDArray[np.bool_]:
    """Whether each of sorted ``scores`` begins a run of equal ones; nans are one run."""
    differs = np.ones(len(scores), bool)
    both_nan = np.isnan(scores[1:]) & np.isnan(scores[:-1])
    differs[1:] = (scores[1:] != scores[:-1]) & ~both_nan
    return differs


def _entropy(rate: float) -> float:
    """Entropy of a coin in nats."""
    if not 0 < rate < 1:
        return 0.0
    return float(-rate * np.log(rate) - (1 - rate) * np.log1p(-rate))
