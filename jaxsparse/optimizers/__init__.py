# SPDX-License-Identifier: Apache-2.0
"""Sparse optimizers: rules that move only the distinct rows a step touches.

A rule of your own is a frozen dataclass with the members of `SparseOptimizer`.
"""

from jaxsparse.optimizers.adagrad import Adagrad
from jaxsparse.optimizers.adam import Adam
from jaxsparse.optimizers.base import Schedule, Slots, SparseOptimizer, rate_of
from jaxsparse.optimizers.ftrl import Ftrl
from jaxsparse.optimizers.rowwise_adagrad import RowwiseAdagrad
from jaxsparse.optimizers.sgd import SGD

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Ftrl",
    "RowwiseAdagrad",
    "Schedule",
    "Slots",
    "SparseOptimizer",
    "rate_of",
]
