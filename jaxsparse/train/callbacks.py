# SPDX-License-Identifier: Apache-2.0
"""Callbacks of `Trainer.fit`: any callable that takes a `FitEvent`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxsparse.train.state import TrainState, copy_state


@dataclasses.dataclass(frozen=True)
class FitEvent:
    """What a callback is told."""

    kind: Literal["log", "eval"]
    """``log``: every ``log_every`` steps; ``eval``: after an evaluation."""
    step: int
    """Updates made so far."""
    metrics: dict[str, Any]
    """The row that goes into the history."""
    state: TrainState
    """Valid during the call only: the next step donates it. Keep `copy_state` of it instead."""


Callback = Callable[[FitEvent], bool | None]
"""Returns True to stop the training after this step.

One with ``state_to_save() -> dict`` and ``restore(dict)`` is saved with the run and goes on with
it; the values are plain ones, numpy arrays or `TrainState`."""


class BestEvaluation:
    """Remembers the best evaluation, and can stop early.

    >>> best = BestEvaluation("auc", patience=1)
    >>> best.step, best.value
    (0, nan)
    """

    def __init__(
        self,
        metric: str = "auc",
        mode: Literal["max", "min"] = "max",
        patience: int | None = None,
    ) -> None:
        """Starts without an evaluation.

        Args:
            metric: name in the evaluation's metrics.
            mode: whether larger or smaller is better.
            patience: evaluations without improvement after which training stops; None: never.

        Raises:
            ValueError: ``mode`` is neither.
        """
        if mode not in ("max", "min"):
            raise ValueError(f"{type(self).__name__}: mode must be 'max' or 'min', got {mode!r}")
        self.metric, self.mode, self.patience = metric, mode, patience
        self.value = math.nan
        """The best value of the metric."""
        self.step = 0
        """Its step."""
        self._without_gain = 0

    def __call__(self, event: FitEvent) -> bool:
        """Compares after evaluations."""
        if event.kind != "eval":
            return False
        if self.metric not in event.metrics:
            raise ValueError(
                f"{type(self).__name__}: no metric {self.metric!r} in the evaluation; "
                f"it has {sorted(event.metrics)}"
            )
        value = float(event.metrics[self.metric])
        gain = value - self.value if self.mode == "max" else self.value - value
        if math.isnan(self.value) or gain > 0:
            self.value, self.step = value, event.step
            self._without_gain = 0
            self._keep(event.state)
            return False
        self._without_gain += 1
        return self.patience is not None and self._without_gain >= self.patience

    def _keep(self, state: TrainState) -> None:
        """Called with the best state so far."""

    def state_to_save(self) -> dict[str, Any]:
        """What a resumed run needs to go on."""
        return {"value": self.value, "step": self.step, "without_gain": self._without_gain}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what `state_to_save` returned."""
        self.value, self.step = saved["value"], saved["step"]
        self._without_gain = saved["without_gain"]


class KeepBest(BestEvaluation):
    """Keeps a copy of the state with the best evaluation metric, and can stop early.

    >>> best = KeepBest("auc", patience=1)
    >>> best.state is None, best.value
    (True, nan)
    """

    state: TrainState | None = None
    """The best state; None before the first evaluation."""

    def _keep(self, state: TrainState) -> None:
        self.state = copy_state(state)

    def state_to_save(self) -> dict[str, Any]:
        """What a resumed run needs to go on."""
        return {"best": self.state, **super().state_to_save()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what `state_to_save` returned."""
        super().restore(saved)
        self.state = saved["best"]
