# SPDX-License-Identifier: Apache-2.0
"""The operations that are timed, on the large ones of their cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxsparse.ops.dot_interaction import dot_interaction
from jaxsparse.ops.dot_interaction.cases import BENCHMARK as DOTS
from jaxsparse.ops.embedding_bag import cases as bag_cases
from jaxsparse.ops.embedding_bag import embedding_bag
from jaxsparse.ops.quantize import stochastic_round_bf16
from jaxsparse.ops.row_update import cases as update_cases
from jaxsparse.ops.row_update import row_update
from jaxsparse.ops.segment_softmax import segment_softmax
from jaxsparse.ops.segment_sum import bag_gradients
from jaxsparse.ops.segment_sum import cases as group_cases
from jaxsparse.ops.unique import cases as unique_cases
from jaxsparse.ops.unique import unique

RULES = ("adagrad", "rowwise_adagrad", "adam", "ftrl")
SEGMENTS, SEGMENT_LENGTH = 4096, 20
"""Of the softmax."""
ROUNDED = (106_496, 64)
"""Rows that are rounded."""
Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Work:
    """One operation on one case."""

    op: str
    case: str
    run: Callable[..., Any]
    """Of ``implementation``, a state and inputs; the state comes first in what it returns."""
    inputs: Any
    least_bytes: int
    state: Any = ()
    """What is updated in place; empty where nothing is."""


def _size(*arrays: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


def _bag(implementation: str, _: Any, inputs: Arrays, parts: tuple[int, ...]) -> Any:
    return (), embedding_bag(**inputs, parts=parts, implementation=implementation)


def bags(case: bag_cases.BagCase, name: str) -> Work:
    inputs = case.arguments()
    table, indices = inputs["table"], {k: v for k, v in inputs.items() if k != "table"}
    assert table is not None and inputs["slots"] is not None
    touched = np.unique(inputs["slots"]).size * table[0].nbytes
    pooled = sum(case.parts) * case.dim * 4
    run = partial(_bag, parts=case.parts)
    return Work("embedding_bag", name, run, inputs, touched + pooled + _size(indices))


def _sum(implementation: str, _: Any, inputs: Arrays) -> Any:
    return (), bag_gradients(**inputs, implementation=implementation)


def sums(case: group_cases.GroupCase, name: str) -> Work:
    inputs = case.arguments()
    return Work("bag_gradients", name, _sum, inputs, _size(inputs) + case.num_groups * case.dim * 4)


def _update(implementation: str, state: Any, inputs: Arrays, rule: Any) -> Any:
    return row_update(rule, *state, **inputs, implementation=implementation), ()


def updates(case: update_cases.UpdateCase, name: str) -> Iterator[Work]:
    for rule_name in RULES:
        inputs = case.arguments(update_cases.RULES[rule_name])
        rule, slab, slots = (inputs.pop(key) for key in ("rule", "slab", "slots"))
        row = _size(slab, slots) // case.num_rows
        least = case.touched * (2 * row + 4 * case.dim + 8)
        run = partial(_update, rule=rule)
        yield Work("row_update", f"{rule_name}, {name}", run, inputs, least, (slab, slots))


def _unique(implementation: str, _: Any, rows: Any, num_rows: int) -> Any:
    return (), unique(rows, num_rows, implementation=implementation)


def uniques(case: unique_cases.Case) -> Work:
    rows = case.rows()
    run = partial(_unique, num_rows=case.num_rows)
    return Work("unique", case.name, run, rows, 4 * rows.nbytes)


def _dots(implementation: str, _: Any, inputs: Arrays) -> Any:
    dots, pull_back = jax.vjp(
        partial(dot_interaction, implementation=implementation), inputs["vectors"]
    )
    return (), (dots, pull_back(inputs["grads"]))


def dots(shape: tuple[int, int, int]) -> Work:
    samples, vectors, dim = shape
    rng = np.random.default_rng(0)
    inputs = {
        "vectors": tuple(rng.random((samples, dim), np.float32) for _ in range(vectors)),
        "grads": rng.random((samples, vectors * (vectors - 1) // 2), np.float32),
    }
    least = 3 * _size(inputs["vectors"]) + 2 * _size(inputs["grads"])
    return Work("dot_interaction", f"{samples} × {vectors} × {dim}, and back", _dots, inputs, least)


def _softmax(implementation: str, _: Any, inputs: Any) -> Any:
    return (), segment_softmax(*inputs, implementation=implementation)


def softmaxes(segments: int, length: int) -> Work:
    scores = np.random.default_rng(0).random(segments * length, np.float32)
    offsets = np.arange(0, scores.size + 1, length, dtype=np.int32)
    least = 2 * _size(scores) + _size(offsets)
    return Work("segment_softmax", f"{segments} of {length}", _softmax, (scores, offsets), least)


def _round(implementation: str, _: Any, inputs: Any) -> Any:
    return (), stochastic_round_bf16(*inputs, 0, 0, implementation=implementation)


def roundings(shape: tuple[int, int]) -> Work:
    values = np.random.default_rng(0).random(shape, np.float32)
    rows = np.arange(shape[0], dtype=np.int32)
    least = _size(values, rows) + _size(values) // 2
    return Work(
        "stochastic_round_bf16", f"{shape[0]:,} × {shape[1]}", _round, (values, rows), least
    )


def works() -> Iterator[Work]:
    """All operations, one at a time: their tables are large."""
    for name, bag_case in bag_cases.TIMED.items():
        yield bags(bag_case, name)
    for name, group_case in group_cases.TIMED.items():
        yield sums(group_case, name)
    for name, update_case in update_cases.TIMED.items():
        yield from updates(update_case, name)
    for case in unique_cases.TIMED:
        yield uniques(case)
    yield dots(DOTS)
    yield softmaxes(SEGMENTS, SEGMENT_LENGTH)
    yield roundings(ROUNDED)
