# SPDX-License-Identifier: Apache-2.0
"""`row_update` and `count_not_finite`: every rule, every implementation, against the reference."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.ops.native import library
from jaxsparse.ops.row_update import RowTables, count_not_finite, is_fused, row_update
from jaxsparse.ops.row_update.cases import CASES, RULES, TIMED
from jaxsparse.ops.row_update.reference import count_not_finite_reference, row_update_reference
from jaxsparse.ops.segment_sum import BagGradients

IMPLEMENTATIONS = ("xla", "native")
QUICK = {
    "xla": ("adagrad_decay",),
    "native": ("sgd", "adagrad", "rowwise_decay", "adam_decay", "ftrl_sparse", "heavy_ball"),
}


def as_arrays(arguments):
    """Arguments of one call without the rule, which is no array."""
    return {name: value for name, value in arguments.items() if name != "rule"}


def check(case, rule, got, want, old):
    """New slab and slots of one call; ``want`` is what the reference gives."""
    untouched = np.ones(old["slab"].shape[0], bool)
    rows = old["rows"]
    untouched[rows[(rows >= 0) & (rows < untouched.size)]] = False
    pairs = {"slab": (got[0], want[0], old["slab"])} | {
        name: (got[1][name], want[1][name], old["slots"][name]) for name in old["slots"]
    }
    for name, (new, expected, before) in pairs.items():
        new = np.asarray(new)
        np.testing.assert_array_equal(
            new[untouched].view(np.uint8),
            before[untouched].view(np.uint8),
            err_msg=f"{case} {name}",
        )
        if new.dtype == ml_dtypes.bfloat16:
            # The noise is the same: where values do not lie beside its threshold, so are the bits.
            same = new.view(np.uint16) == expected.view(np.uint16)
            close = np.isclose(new.astype(np.float32), expected.astype(np.float32), rtol=0.008)
            assert (same | close | np.isnan(new.astype(np.float32))).all(), (case, rule, name)
            assert same.mean() > 0.99, (case, rule, name)
        elif new.dtype == np.int32:
            np.testing.assert_array_equal(new, expected)
        else:
            # A step is a sum of terms: what it loses is measured by the largest of them.
            with np.errstate(all="ignore"):
                error = np.abs(new.astype(np.float64) - expected)
                size = np.maximum(np.abs(before), np.abs(expected)) + np.abs(expected - before)
                bad = ~(error <= 2e-6 * size + 1e-38) & np.isfinite(expected)
            assert not bad.any(), (case, rule, name, new[bad][:3], expected[bad][:3])
            np.testing.assert_array_equal(
                np.isfinite(new), np.isfinite(expected), err_msg=f"{case} {rule} {name}"
            )


@pytest.mark.parametrize(
    ("rule", "implementation"),
    [
        pytest.param(rule, way, marks=[] if rule in QUICK[way] else pytest.mark.slow)
        for way in IMPLEMENTATIONS
        for rule in RULES
    ],
)
def test_equals_reference(rule, implementation):
    calls = {n: case.arguments(RULES[rule], seed) for seed, (n, case) in enumerate(CASES.items())}

    @jax.jit
    def run(calls):
        moved, counts = {}, {}
        for name, given in calls.items():
            given = {"rule": RULES[rule], **given, "seed": 7, "implementation": implementation}
            counts[name] = count_not_finite(**given)
            moved[name] = row_update(**given)
        return moved, counts

    moved, counts = run({name: as_arrays(given) for name, given in calls.items()})
    for name, given in calls.items():
        with np.errstate(all="ignore"):
            want = row_update_reference(**given, seed=7)
        check(name, rule, moved[name], want, given)
        assert int(counts[name]) == count_not_finite_reference(**given, seed=7), (name, rule)
        if "extremes" in name:
            assert int(counts[name]) > 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rule", ["adagrad", "heavy_ball"])
def test_not_enabled_changes_no_bit(implementation, rule):
    given = CASES["extremes"].arguments(RULES[rule])
    run = jax.jit(partial(row_update, given.pop("rule"), implementation=implementation))
    slab, slots = run(**given, enabled=jnp.bool_(False))
    assert np.asarray(slab).tobytes() == given["slab"].tobytes()
    for name, array in slots.items():
        assert np.asarray(array).tobytes() == given["slots"][name].tobytes()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tables_give_rates_and_noise(implementation):
    given = CASES["bfloat16"].arguments(RULES["adagrad"])
    starts = np.array([0, 10, 10, 33], np.int32)
    rates = np.float32([0.5, 9.0, 0.25, 0.0])
    noise = np.uint32([2**32 - 3, 9, 77, 0])
    table = np.searchsorted(starts, given["rows"], side="right") - 1
    given["rates"] = rates[table]
    noise_rows = given["rows"].astype(np.uint32) + noise[table]
    want = row_update_reference(**given, noise_rows=noise_rows)
    given["rates"] = RowTables(*map(jnp.asarray, (starts, rates, noise)))
    rule = given.pop("rule")
    got = jax.jit(partial(row_update, rule, implementation=implementation))(**given)
    check("tables", "adagrad", got, want, {**given, "rule": rule})


def test_rows_out_of_range_are_left_out():
    given = CASES["plain"].arguments(RULES["adam"])
    given["rows"][-4:] = [-1, -(2**31), 2**31 - 1, given["slab"].shape[0]]
    want = row_update_reference(**given)
    for implementation in IMPLEMENTATIONS:
        arrays = {n: jax.tree.map(jnp.asarray, v) for n, v in given.items() if n != "rule"}
        got = row_update(given["rule"], **arrays, implementation=implementation)
        check("out of range", "adam", got, want, given)


@pytest.mark.parametrize("rule", ["adagrad", "heavy_ball"])
def test_donated_tables_are_updated_in_place(rule):
    given = CASES["bfloat16"].arguments(RULES[rule])
    arrays = {n: jax.tree.map(jnp.array, v) for n, v in given.items() if n != "rule"}
    tables = arrays.pop("slab"), arrays.pop("slots")
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tables)]

    @partial(jax.jit, donate_argnums=0)
    def run(tables, arrays):
        count = count_not_finite(RULES[rule], *tables, **arrays, implementation="native")
        return row_update(
            RULES[rule], *tables, **arrays, enabled=count == 0, implementation="native"
        )

    compiled = run.lower(tables, arrays).compile()
    assert "copy" not in {
        line.split("(")[0].split()[-1] for line in compiled.as_text().splitlines() if " = " in line
    }
    new = compiled(tables, arrays)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(new)] == pointers


def test_only_shipped_rules_are_fused():
    assert [is_fused(rule) for rule in RULES.values()] == [n != "heavy_ball" for n in RULES]

    class Other(js.SGD):
        def update(self, w, slots, g, lr, step):
            return w, {}

    assert not is_fused(Other(0.1))


def test_the_kernel_is_what_runs():
    given = CASES["plain"].arguments(RULES["sgd"])
    run = jax.jit(partial(row_update, given.pop("rule"), implementation="native"))
    assert "jaxsparse_row_update" in run.lower(**given).as_text()


def test_timed_cases_are_large():
    assert all(case.num_rows >= 10**6 for case in TIMED.values())


def test_a_table_that_moves_to_huge_pages_keeps_its_rows():
    size = 3 << 20  # rows of 16 bytes: 48 MiB, above the least that is moved
    slab = jnp.arange(4 * size, dtype=jnp.float32).reshape(size, 4)
    rows = jnp.array([0, size // 2, size - 1, size], jnp.int32)
    run = jax.jit(partial(row_update, RULES["sgd"], implementation="native"), donate_argnums=0)
    for _ in range(2):
        slab, _ = run(slab, {}, rows, jnp.ones((4, 4)), jnp.ones((4,)), 0)
    want = np.arange(4 * size, dtype=np.float32).reshape(size, 4)
    for _ in range(2):
        want[[0, size // 2, size - 1]] -= 1
    np.testing.assert_array_equal(slab, want)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"slab": np.ones((5, 4), np.float16)}, "slab must be float32 or bfloat16 [R, D], got"),
        ({"slots": {}}, "has the slot 'accumulator', got []"),
        (
            {"slots": {"accumulator": np.ones((5, 3), np.float32)}},
            "slot 'accumulator' must be float32 [R = 5, D = 4], got float32 [5, 3]",
        ),
        (
            {"slots": {"accumulator": np.ones((5, 4), np.float16)}},
            "slot 'accumulator' must be float32 [R = 5, D = 4], got float16 [5, 4]",
        ),
        ({"rows": np.zeros(2, np.int32)}, "grads must be float32 [K = 2, D = 4], got float32 [3,"),
        ({"grads": np.ones((3, 8), np.float32)}, "grads must be float32 [K = 3, D = 4], got"),
        ({"rates": np.ones(1, np.float32)}, "rates must be float32 [K = 3], got float32 [1]"),
        ({"noise_rows": np.arange(2)}, "noise must be uint32 [K = 3], got uint32 [2]"),
        (
            {
                "rates": RowTables(
                    np.zeros(2, np.int32), np.ones(1, np.float32), np.zeros(2, np.uint32)
                )
            },
            "rates must be float32 [T = 2], got float32 [1]",
        ),
        ({"step": np.zeros(0, np.int32)}, "step must be int32 [], got int32 [0]"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(wrong, message):
    """A kernel would read and write beside them."""
    fitting = {
        "slab": np.ones((5, 4), np.float32),
        "slots": {"accumulator": np.ones((5, 4), np.float32)},
        "rows": np.arange(3, dtype=np.int32),
        "grads": np.ones((3, 4), np.float32),
        "rates": np.ones(3, np.float32),
        "step": 0,
    }
    for op in (row_update, count_not_finite):
        with pytest.raises(ValueError, match=rf"{op.__name__}: .*{re.escape(message)}"):
            op(js.Adagrad(0.1), **(fitting | wrong))
    with pytest.raises(ValueError, match=r"enabled must be bool \[\], got bool \[1\]"):
        row_update(js.Adagrad(0.1), **fitting, enabled=np.ones(1, bool))


@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize("rule", [js.SGD(0.1), RULES["heavy_ball"]])
def test_several_gradients_are_judged_at_once(rule, implementation):
    """As of a search over steps: of each what it would do alone."""
    grads = np.ones((3, 2, 4), np.float32)
    grads[1, 0, 2] = grads[2, 0, 0] = grads[2, 1, 3] = np.inf

    def count(each):
        slots = rule.init_slots(5, 4)
        return count_not_finite(
            rule,
            jnp.ones((5, 4)),
            slots,
            jnp.arange(2),
            each,
            jnp.ones(2),
            0,
            implementation=implementation,
        )

    assert jax.vmap(count)(grads).tolist() == [0, 1, 2]


class Reshaping(js.SGD):
    """Leaves to the one who writes its rows what numpy would broadcast."""

    def init_slots(self, num_rows, dim):
        """One number a row."""
        return {"count": jnp.zeros(num_rows)}

    def update(self, w, slots, g, lr, step):
        """Moves a row by its first column."""
        return w[:, :1] - lr * g[:, :1], {"count": slots["count"]}


@pytest.mark.parametrize("implementation", ["xla", None])
def test_a_rule_that_changes_the_shape_of_rows_is_refused(implementation):
    with pytest.raises(ValueError, match=r"Reshaping.update: w must be \[1, 4\] .* got \[1, 1\]"):
        row_update(
            Reshaping(0.1),
            jnp.ones((5, 4)),
            {"count": jnp.zeros(5)},
            jnp.array([1]),
            jnp.ones((1, 4)),
            jnp.ones(1),
            0,
            implementation=implementation,
        )


def test_sums_that_are_to_be_made_are_the_same() -> None:
    """The kernel that sums and moves in one pass has the bits of the two kernels it stands for."""
    rng = np.random.default_rng(3)
    counts = np.array([1, 0, 3, 5000, 1, 7, 2100, 0])
    offsets = jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32)
    num_terms, num_bags = int(counts.sum()), 4096
    rows = jnp.asarray([5, 1, 30, 2, 8, 40, 0, 3], jnp.int32)  # 40 is none
    for dim, dtype, rule in ((8, jnp.float32, js.Adagrad(0.1)), (17, jnp.bfloat16, js.SGD(0.1))):
        grads = tuple(
            jnp.asarray(rng.normal(size=(num_bags // 2, dim)), jnp.float32) for _ in range(2)
        )
        by_bag = BagGradients(
            grads,
            offsets,
            jnp.asarray(rng.integers(-1, num_bags + 1, num_terms), jnp.int32),
            jnp.asarray(rng.permutation(num_terms), jnp.int32),
            jnp.asarray(rng.normal(size=num_terms), jnp.float32),
            jnp.asarray(rng.normal(size=num_bags), jnp.float32),
        )
        slab = jnp.asarray(rng.normal(size=(31, dim)), dtype)
        slots = rule.init_slots(31, dim)
        rates = jnp.full(8, 0.1)
        results = [
            row_update(rule, slab, slots, rows, sums, rates, 3, implementation=how)
            for how in ("native" if library.is_available() else None, "xla")
            for sums in (by_bag, by_bag.sum(how))
        ]
        for first, second in (results[:2], results[2:]):
            for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_sums_to_be_made_that_do_not_fit_are_refused() -> None:
    sums = BagGradients((jnp.ones((3, 2)),), jnp.array([0, 1]), jnp.array([0]))
    slab = jnp.ones((4, 2))
    with pytest.raises(ValueError, match=r"grads must be float32 \[K = 2, D = 2\], got float32"):
        row_update(js.SGD(0.1), slab, {}, jnp.array([0, 1]), sums, jnp.ones(2), 0)
    ragged = dataclasses.replace(sums, scale=jnp.ones(2))
    with pytest.raises(ValueError, match=r"scale must be float32 \[O = 3\], got float32 \[2\]"):
        row_update(js.SGD(0.1), slab, {}, jnp.array([0]), ragged, jnp.ones(1), 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slots_that_would_become_infinite_are_counted(implementation: str) -> None:
    """A gradient whose square overflows leaves weights finite and holds the row for ever."""
    if implementation == "native" and not library.is_available():
        pytest.skip("there is no native library here")
    grads = jnp.asarray([[1e20, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, -1e25]], jnp.float32)
    rows = jnp.asarray([0, 3, 9], jnp.int32)  # 9 is none
    for rule in (js.Adagrad(0.1), js.RowwiseAdagrad(0.1), js.Adam(0.1), js.Ftrl(0.1)):
        for dtype in (jnp.float32, jnp.bfloat16):
            slab, slots = jnp.ones((5, 3), dtype), rule.init_slots(5, 3)
            before = jax.tree.map(np.asarray, slots)
            count = count_not_finite(
                rule, slab, slots, rows, grads, jnp.full(3, 0.1), 0, implementation=implementation
            )
            assert int(count) == 1, rule
            for a, b in zip(jax.tree.leaves(slots), jax.tree.leaves(before), strict=True):
                assert np.asarray(a).tobytes() == b.tobytes()
