# SPDX-License-Identifier: Apache-2.0
"""The oracle is independent of the package, and right where a hand can check it."""

import ast
import math
import pathlib
import sys

import numpy as np
import pytest

from tests import oracle


def test_oracle_imports_only_numpy_and_the_standard_library():
    tree = ast.parse(pathlib.Path(oracle.__file__).read_text(encoding="utf-8"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            imported.add(node.module)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"__import__", "eval", "exec"}
    roots = {name.split(".")[0] for name in imported}
    assert "numpy" in roots
    assert roots - {"numpy"} <= sys.stdlib_module_names
    assert "importlib" not in roots


ROWS = {0: np.array([1.0, -2.0]), 5: np.array([3.0, 4.0]), 7: np.array([0.5, 0.0])}


@pytest.mark.parametrize(
    ("combiner", "want", "want_abs"),
    [
        ("sum", [4.0, 2.0], [4.0, 6.0]),
        ("mean", [2.0, 1.0], [2.0, 3.0]),
        ("sqrtn", [4 / math.sqrt(2), 2 / math.sqrt(2)], [4 / math.sqrt(2), 6 / math.sqrt(2)]),
    ],
)
def test_lookup_pools_and_leaves_empty_bags_zero(combiner, want, want_abs):
    value, absolute = oracle.pooled_lookup([[], [0, 5], []], ROWS, 2, combiner)
    np.testing.assert_allclose(value, [[0, 0], want, [0, 0]], rtol=1e-15)
    np.testing.assert_allclose(absolute, [[0, 0], want_abs, [0, 0]], rtol=1e-15)


def test_mean_counts_ids_not_weights():
    value, absolute = oracle.pooled_lookup(([[0, 5]], [[-2.0, 1.0]]), ROWS, 2, "mean")
    assert value.tolist() == [[0.5, 4.0]]  # (-2*[1, -2] + [3, 4]) / 2
    assert absolute.tolist() == [[2.5, 4.0]]


def test_unpooled_is_zero_beyond_each_length():
    value, _ = oracle.pooled_lookup([[5], [], [0, 0]], ROWS, 2, None, max_length=2)
    assert value.tolist() == [[[3, 4], [0, 0]], [[0, 0], [0, 0]], [[1, -2], [1, -2]]]


def test_padding_goes_before_truncation():
    options = {"padding_id": 9, "max_length": 2}
    bags = [[9, 0, 9, 5, 7]]
    head, _ = oracle.pooled_lookup(bags, ROWS, 2, "sum", truncate="head", **options)
    tail, _ = oracle.pooled_lookup(bags, ROWS, 2, "sum", truncate="tail", **options)
    assert head.tolist() == [[4.0, 2.0]]
    assert tail.tolist() == [[3.5, 4.0]]
    with pytest.raises(ValueError, match="a bag of 3 ids, max_length 2"):
        oracle.pooled_lookup(bags, ROWS, 2, "sum", **options)


def test_unpooled_padding_keeps_its_place():
    options = {"padding_id": 9, "max_length": 2}
    value, _ = oracle.pooled_lookup([[9, 5, 9], [0, 9]], ROWS, 2, None, **options)
    assert value.tolist() == [[[0, 0], [3, 4]], [[1, -2], [0, 0]]]
    head, _ = oracle.pooled_lookup([[5, 9, 0]], ROWS, 2, None, truncate="head", **options)
    tail, _ = oracle.pooled_lookup([[5, 9, 0]], ROWS, 2, None, truncate="tail", **options)
    assert head.tolist() == [[[3, 4], [0, 0]]]
    assert tail.tolist() == [[[0, 0], [1, -2]]]


def test_row_grads_sum_all_occurrences():
    entry = ([[0, 5, 0], [5]], [[1.0, 2.0, 1.0], [-1.0]])
    grads = oracle.pooled_row_grads(entry, [[3.0, 6.0], [1.0, 1.0]], 2, "mean")
    assert sorted(grads) == [0, 5]
    np.testing.assert_allclose(grads[0], ([2, 4], [2, 4]))
    np.testing.assert_allclose(grads[5], ([1, 3], [3, 5]))
    unpooled = oracle.pooled_row_grads([[0, 0]], [[[1, 2], [3, 4]]], 2, None, max_length=2)
    np.testing.assert_allclose(unpooled[0][0], [4, 6])


def test_weight_grads_keep_the_order_of_the_users_values():
    entry = ([[9, 5], [0, 7, 5]], [[1.0, 1.0], [1.0, 1.0, 1.0]])
    value, absolute = oracle.pooled_weight_grads(
        entry, [[1, 0], [1, 1]], ROWS, "mean", padding_id=9, max_length=2, truncate="tail"
    )
    assert value.tolist() == [0.0, 3.0, 0.0, 0.25, 3.5]
    assert absolute.tolist() == [0.0, 3.0, 0.0, 0.25, 3.5]


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", None])
def test_grads_are_the_derivative_of_lookup(combiner):
    rng = np.random.default_rng(0)
    rows = {key: rng.normal(size=3) for key in range(4)}
    bags, weights = [[0, 1, 0], [], [3]], [[0.5, -1.0, 2.0], [], [1.5]]
    shape = (3, 3) if combiner else (3, 3, 3)
    grad = rng.normal(size=shape)
    options = {"combiner": combiner, "max_length": 3}

    def loss():
        return float((oracle.pooled_lookup((bags, weights), rows, 3, **options)[0] * grad).sum())

    def slope(values, at):
        kept, h = values[at], 1e-6
        values[at] = kept + h
        above = loss()
        values[at] = kept - h
        below = loss()
        values[at] = kept
        return (above - below) / (2 * h)

    found = oracle.pooled_row_grads((bags, weights), grad, 3, **options)
    assert sorted(found) == [0, 1, 3]
    for key, (total, _) in found.items():
        np.testing.assert_allclose(total, [slope(rows[key], d) for d in range(3)], atol=1e-8)
    got, _ = oracle.pooled_weight_grads((bags, weights), grad, rows, **options)
    want = [slope(bag, i) for bag in weights for i in range(len(bag))]
    np.testing.assert_allclose(got, want, atol=1e-8)


@pytest.mark.parametrize(
    ("rule", "hyper", "want", "want_slots"),
    [
        ("sgd", {}, [0.8, 1.0], {}),
        ("sgd", {"l2": 0.5}, [0.75, 0.95], {}),
        ("sgd", {"weight_decay": 0.5}, [0.75, 0.95], {}),
        # sqrt(5 + 2**2) = 3
        (
            "adagrad",
            {"initial_accumulator": 5.0, "eps": 1.0},
            [1 - 0.1 * 2 / 4, 1],
            {"accumulator": [9.0, 5.0]},
        ),
        # sqrt(7 + (2**2 + 0) / 2) = 3
        (
            "rowwise_adagrad",
            {"initial_accumulator": 7.0, "eps": 1.0},
            [1 - 0.1 * 2 / 4, 1],
            {"accumulator": 9.0},
        ),
        (
            "adam",
            {"b1": 0.5, "b2": 0.75, "eps": 2.0},
            [1 - 0.1 * 2 / 4, 1],
            {"m": [1, 0], "v": [1, 0]},
        ),
        # sigma = 2 / .1; z = 2 - 20, w = 18 / ((1 + 2) / .1); z = 0 makes the second element 0
        ("ftrl", {}, [0.6, 0.0], {"z": [-18, 0], "n": [4, 0]}),
        ("ftrl", {"l1": 3.0, "l2": 20.0}, [0.3, 0.0], {"z": [-18, 0], "n": [4, 0]}),
        ("ftrl", {"beta": 0.0}, [0.9, 1.0], {"z": [-18, 0], "n": [4, 0]}),
    ],
)
def test_rules_by_hand(rule, hyper, want, want_slots):
    slots = oracle.initial_slots(rule, 2, **hyper)
    w, slots = oracle.update_row(rule, [1.0, 1.0], slots, [2.0, 0.0], 0.1, 0, **hyper)
    np.testing.assert_allclose(w, want, rtol=1e-14)
    assert sorted(slots) == sorted(want_slots)
    for name, value in want_slots.items():
        np.testing.assert_allclose(slots[name], value, rtol=1e-14)


def test_unknown_hyperparameter_is_an_error():
    with pytest.raises(AssertionError, match=r"sgd has no \['momentum'\]"):
        oracle.initial_slots("sgd", 2, momentum=0.9)


def make_collection(**table):
    rows = {7: [0.0], 3: [0.0], 9: [0.0]}
    return oracle.OracleCollection(
        {"t": {"dim": 1, "rows": rows, "rule": "sgd", "learning_rate": 1.0, **table}},
        [{"name": "f1", "table": "t"}, {"name": "f2", "table": "t"}],
    )


BATCH = {"f1": [[7], [7], [3]], "f2": [[7], [], [3, 9]]}
ONES = {"f1": np.ones((3, 1)), "f2": np.ones((3, 1))}


def test_collection_updates_a_shared_row_once_from_the_sum():  # field case A15
    collection = make_collection()
    sizes = collection.update(BATCH, ONES, 0)
    assert collection.read("t", [7, 3, 9]).tolist() == [[-3.0], [-2.0], [-1.0]]
    assert sizes == {"t": {7: 3.0, 3: 2.0, 9: 1.0}}
    value, absolute = collection.lookup(BATCH)["f2"]
    assert value.tolist() == [[-3.0], [0.0], [-3.0]]
    assert absolute.tolist() == [[3.0], [0.0], [3.0]]


def test_collection_sums_before_squaring():  # field case C02
    collection = make_collection(rule="adagrad")
    collection.update({"f1": [[7]], "f2": [[7]]}, {"f1": [[0.5]], "f2": [[-0.3]]}, 0)
    np.testing.assert_allclose(collection.read_slots("t", [7, 3])["accumulator"], [[0.14], [0.1]])


def test_collection_schedule_own_rule_and_frozen_table():
    def own(w, slots, g, lr, step):
        return w - lr * g - step, {"touched": slots["touched"] + 1}

    collection = make_collection(
        rule=own, slots={"touched": 0}, learning_rate=lambda step: step + 1.0
    )
    batch, grads = {"f1": [[7]], "f2": [[]]}, {"f1": [[1.0]], "f2": [[1.0]]}
    collection.update(batch, grads, 0)
    collection.update(batch, grads, 1)
    assert collection.read("t", [7]).tolist() == [[-1.0 - 3.0]]
    assert collection.travelled("t", [7, 9]).tolist() == [[4.0], [0.0]]
    assert collection.read_slots("t", [7, 3])["touched"].tolist() == [2, 0]
    frozen = make_collection(trainable=False)
    assert frozen.update(BATCH, ONES, 0) == {"t": {}}
    assert frozen.read("t", [7]).tolist() == [[0.0]]


def test_assertions_see_what_they_must():
    oracle.assert_scaled(np.float32([1.0, 0.0]), [1.0 + 0.9e-6, 0.0], [1.0, 0.0])
    oracle.assert_scaled(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros((0, 3)))
    oracle.assert_rows(np.float32([[1.0]]), [[1.0 + 0.9e-5]], [[1.0]])
    oracle.assert_rows(np.float32([1.0]), [1.0 + 2.0**-22], 0.0)  # 2 ulp of 1.0
    with pytest.raises(AssertionError, match=r"1 of 2 differ; worst at \(1,\)"):
        oracle.assert_scaled([1.0, 1.1], [1.0, 1.0], [1.0, 1.0])
    with pytest.raises(AssertionError, match="worst at"):
        oracle.assert_scaled([np.nan], [1.0], [1.0])
    with pytest.raises(AssertionError, match="shape"):
        oracle.assert_scaled([[1.0]], [1.0], [1.0])
    with pytest.raises(AssertionError, match="worst at"):
        oracle.assert_rows(np.float32([1.0]), [1.0 + 2.1 * 2.0**-23], 0.0)
