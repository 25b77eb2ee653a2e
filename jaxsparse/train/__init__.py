# SPDX-License-Identifier: Apache-2.0
"""Training: the step, the loop around it, metrics, callbacks and reports."""

from jaxsparse.packed_batch import PackedBatch
from jaxsparse.train.batches import Dataset
from jaxsparse.train.callbacks import BestEvaluation, Callback, FitEvent, KeepBest
from jaxsparse.train.metrics import BinaryMetrics, StreamingAUC
from jaxsparse.train.profiling import ProfileSteps
from jaxsparse.train.result import FitResult
from jaxsparse.train.state import TrainState, copy_state
from jaxsparse.train.step import StepProgram, sum_grads
from jaxsparse.train.trainer import Trainer

__all__ = [
    "BestEvaluation",
    "BinaryMetrics",
    "Callback",
    "Dataset",
    "FitEvent",
    "FitResult",
    "KeepBest",
    "PackedBatch",
    "ProfileSteps",
    "StepProgram",
    "StreamingAUC",
    "TrainState",
    "Trainer",
    "copy_state",
    "sum_grads",
]
