# SPDX-License-Identifier: Apache-2.0
"""Kernels on the device at hand against their references, on the cases that tests use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.ops.dot_interaction import cases as dot_cases
from jaxsparse.ops.dot_interaction import dot_interaction
from jaxsparse.ops.dot_interaction.reference import dot_interaction_reference
from jaxsparse.ops.embedding_bag import cases as bag_cases
from jaxsparse.ops.embedding_bag import embedding_bag
from jaxsparse.ops.embedding_bag.reference import embedding_bag_reference
from jaxsparse.ops.row_update import cases as update_cases
from jaxsparse.ops.row_update import count_not_finite, row_update
from jaxsparse.ops.row_update.reference import count_not_finite_reference, row_update_reference
from jaxsparse.ops.segment_sum import bag_gradients
from jaxsparse.ops.segment_sum import cases as group_cases
from jaxsparse.ops.segment_sum.reference import bag_gradients_reference
from jaxsparse.ops.unique import cases as unique_cases
from jaxsparse.ops.unique import unique
from jaxsparse.ops.unique.reference import unique_reference

Check = Callable[[str], str]
"""From an implementation to what is wrong with it, or nothing."""

SUM_TOLERANCE = 1e-6
"""Of the sum of the terms' absolute values."""

STEP_TOLERANCE = 3e-6
"""Of the largest term of a row's step: GPUs divide and take roots to 2 units in the last place."""


def check_all(implementation: Any, *, only: Callable[[str], bool] = lambda name: True) -> dict:
    """What is wrong, by name of the check; empty texts where nothing is.

    Args:
        implementation: of the operations.
        only: names to check.
    """
    return {name: check(implementation) for name, check in checks().items() if only(name)}


def checks() -> dict[str, Check]:
    """Every case of every operation that has a kernel."""
    found: dict[str, Check] = {}
    for name, bag in bag_cases.CASES.items():
        found[f"embedding_bag {name}"] = partial(_bags, bag)
    for name, group in group_cases.CASES.items():
        found[f"bag_gradients {name}"] = partial(_sums, group)
    for rule_name, rule in update_cases.RULES.items():
        for name, update in update_cases.CASES.items():
            found[f"row_update {rule_name} {name}"] = partial(_updates, rule, update)
    for name, shape in dot_cases.SHAPES.items():
        found[f"dot_interaction {name}"] = partial(_dots, shape)
    for case in unique_cases.CASES:
        found[f"unique {case.name}"] = partial(_groups, case)
    return found


def _bags(case: Any, implementation: str) -> str:
    given = case.arguments()
    run = partial(embedding_bag, parts=case.parts, implementation=implementation)
    got = np.concatenate(jax.jit(run)(**given))
    names = ("table", "weights", "scale")
    terms = {**given, **{n: None if given[n] is None else abs(given[n]) for n in names}}
    return _sums_differ(got, embedding_bag_reference(**given), embedding_bag_reference(**terms))


def _sums(case: Any, implementation: str) -> str:
    given = case.arguments()
    got = jax.jit(partial(bag_gradients, implementation=implementation))(**given)
    terms = given | {"grads": tuple(map(np.abs, given["grads"]))}
    if given["weights"] is not None:
        terms["weights"] = np.abs(given["weights"])
    return _sums_differ(got, bag_gradients_reference(**given), bag_gradients_reference(**terms))


def _sums_differ(got: Any, want: Any, terms: Any) -> str:
    error = np.abs(np.asarray(got, np.float64) - want)
    bad = ~(error <= SUM_TOLERANCE * terms)
    return f"{bad.sum()} sums differ, by up to {error.max()}" if bad.any() else ""


def _updates(rule: Any, case: Any, implementation: str) -> str:
    given = case.arguments(rule)
    arrays = {name: value for name, value in given.items() if name != "rule"}
    run = partial(row_update, rule, seed=7, implementation=implementation)
    slab, slots = jax.jit(run)(**arrays)
    count = partial(count_not_finite, rule, seed=7, implementation=implementation)
    with np.errstate(all="ignore"):
        want_slab, want_slots = row_update_reference(**given, seed=7)
        want_count = count_not_finite_reference(**given, seed=7)
        problems = [_rows_differ("rows", slab, want_slab, given["slab"])]
        for name, want in want_slots.items():
            problems.append(_rows_differ(name, slots[name], want, given["slots"][name]))
    if int(jax.jit(count)(**arrays)) != want_count:
        problems.append(f"rows that are not finite: {want_count} expected")
    return "; ".join(filter(None, problems))


def _rows_differ(name: str, got: Any, want: Any, old: Any) -> str:
    got = np.asarray(got)
    if got.dtype.itemsize == 2:
        # A value beside the threshold of its noise may be rounded to the other side.
        same = got.view(np.uint16) == want.view(np.uint16)
        return "" if same.mean() > 0.99 else f"{name}: {(~same).sum()} bfloat16 differ"
    if (np.isfinite(got) != np.isfinite(want)).any():
        return f"{name}: others are finite"
    got, want, old = (array.astype(np.float64)[np.isfinite(want)] for array in (got, want, old))
    size = np.maximum(np.abs(old), np.abs(want)) + np.abs(want - old)
    bad = ~(np.abs(got - want) <= STEP_TOLERANCE * size + 1e-37)
    return f"{name}: {bad.sum()} differ" if bad.any() else ""


def _dots(shape: tuple[int, int, int], implementation: str) -> str:
    samples, vectors, dim = shape
    drawn = np.random.default_rng(0).normal(size=(vectors, samples, dim)).astype(np.float32)
    arrays = tuple(jnp.asarray(drawn))

    def both(run: Callable[[Any], jax.Array]) -> tuple[jax.Array, Any]:
        dots, pull_back = jax.vjp(run, arrays)
        return dots, pull_back(jnp.cos(dots))

    got = jax.jit(lambda: both(partial(dot_interaction, implementation=implementation)))()
    want = jax.jit(lambda: both(dot_interaction_reference))()
    # Sums of as many products as there are columns, or vectors.
    bound = SUM_TOLERANCE * 16 * max(dim, vectors)
    worst = max(
        float(jnp.abs(a - b).max(initial=0))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )
    return "" if worst <= bound else f"differ by up to {worst}"


def _groups(case: Any, implementation: Any) -> str:
    rows = case.rows()
    got = jax.jit(lambda rows: unique(rows, case.num_rows, implementation=implementation))(rows)
    want = unique_reference(rows, case.num_rows)
    same = [np.array_equal(a, b) for a, b in zip(got, want, strict=True)]
    return "" if all(same) else "groups differ"
