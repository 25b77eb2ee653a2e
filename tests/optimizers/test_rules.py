# SPDX-License-Identifier: Apache-2.0
"""Each shipped rule against the float64 oracle, and the field cases about rules."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxsparse.optimizers import SGD, Adagrad, Adam, Ftrl, RowwiseAdagrad, SparseOptimizer
from jaxsparse.optimizers.arithmetic import one_minus_power
from tests import oracle

RULES = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowwiseAdagrad,
    "adam": Adam,
    "ftrl": Ftrl,
}
DECAYED = [SGD, Adagrad, RowwiseAdagrad, Adam]


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@jax.jit(static_argnums=0)
def update(rule, w, slots, g, lr, step):
    """Compiled once for all equal rules."""
    return rule.update(w, slots, g, lr, step)


def one_step(rule, w, g, *, lr, step=0, slots=None):
    """Updates rows ``w`` [U, D] and returns numpy arrays; new slots unless given."""
    w, g = jnp.asarray(w, jnp.float32), jnp.asarray(g, jnp.float32)
    slots = rule.init_slots(*w.shape) if slots is None else slots
    lr = jnp.full((len(w), 1), lr, jnp.float32)
    w, slots = update(rule, w, slots, g, lr, jnp.int32(step))
    return np.asarray(w), jax.tree.map(np.asarray, slots)


# ---- against the oracle -----------------------------------------------------------------------

CASES = [
    (name, hyper)
    for name in ("sgd", "adagrad", "rowwise_adagrad", "adam")
    for hyper in (
        {},
        {"l2": 0.03},
        {"weight_decay": 0.05},
        {"l2": 0.03, "weight_decay": 0.05, "catch_up_decay": True},
    )
]
CASES += [
    ("adagrad", {"initial_accumulator": 0.5, "eps": 1e-3}),
    ("rowwise_adagrad", {"initial_accumulator": 0.5, "eps": 1e-3}),
    ("adam", {"b1": 0.0, "b2": 0.9, "eps": 1e-4}),
    ("adam", {"per_row_count": True, "weight_decay": 0.05, "catch_up_decay": True}),
    ("ftrl", {}),
    ("ftrl", {"beta": 0.0, "l2": 0.3}),
    ("ftrl", {"beta": 0.5, "l1": 0.4, "l2": 0.1}),
]


@pytest.mark.parametrize("scheduled", [False, True], ids=["float", "schedule"])
@pytest.mark.parametrize(("name", "hyper"), CASES, ids=str)
def test_rule_equals_oracle_over_20_steps(name, hyper, scheduled):
    rng = np.random.default_rng([CASES.index((name, hyper)), scheduled])
    schedule = optax.linear_schedule(0.1, 0.02, 20) if scheduled else (lambda step: 0.05)
    rule = RULES[name](schedule if scheduled else 0.05, **hyper)
    rows, dim, touched = 24, 5, 7
    table = rng.normal(scale=0.3, size=(rows, dim)).astype(np.float32)
    slots = jax.tree.map(np.array, rule.init_slots(rows, dim))
    spec = {"dim": dim, "rule": name, "learning_rate": schedule, "rows": dict(enumerate(table))}
    want = oracle.OracleCollection({"t": {**spec, **hyper}}, [{"name": "f", "table": "t"}])
    for step in range(20):
        picked = rng.choice(rows, touched, replace=False)
        g = rng.normal(size=(touched, dim)).astype(np.float32)
        lr = jnp.full((touched, 1), schedule(step), jnp.float32)
        before = {name: slot[picked] for name, slot in slots.items()}
        moved, new_slots = update(rule, table[picked], before, g, lr, jnp.int32(step))
        assert {k: (v.dtype, v.shape[1:]) for k, v in new_slots.items()} == {
            k: (v.dtype, v.shape[1:]) for k, v in slots.items()
        }
        assert moved.dtype == jnp.float32
        table[picked] = moved
        for key, value in new_slots.items():
            slots[key][picked] = value
        want.update({"f": [[key] for key in picked]}, {"f": g}, step)
        oracle.assert_rows(table, want.read("t", range(rows)), want.travelled("t", range(rows)))
    for key, value in want.read_slots("t", range(rows)).items():
        np.testing.assert_allclose(slots[key], value, rtol=2e-5, atol=2e-6, err_msg=key)


def test_sgd_is_bitwise_on_dyadic_input():
    rng = np.random.default_rng(1)
    w, g = (rng.integers(-64, 65, (50, 8)) / 64 for _ in range(2))
    got, _ = one_step(SGD(0.5), w, g, lr=0.5)
    assert np.array_equal(got, w - 0.5 * g)


def test_each_row_uses_its_own_learning_rate():
    w, g = jnp.zeros((2, 2)), jnp.ones((2, 2))
    got, _ = SGD(0.1).update(w, {}, g, jnp.float32([[1.0], [2.0]]), jnp.int32(0))
    assert got.tolist() == [[-1, -1], [-2, -2]]


@pytest.mark.parametrize("rule_class", [*RULES.values()])
def test_slots_are_float32_or_counters_and_rows_alike(rule_class):
    decay = {} if rule_class is Ftrl else {"weight_decay": 0.1, "catch_up_decay": True}
    for name, slot in rule_class(0.1, **decay).init_slots(5, 3).items():
        assert slot.dtype == (jnp.int32 if name == "last_step" else jnp.float32)
        assert slot.shape in {(5, 3), (5,)}
        assert (np.asarray(slot) == np.asarray(slot)[:1]).all()


# ---- field cases ------------------------------------------------------------------------------


def test_c04_late_row_by_global_step_and_by_its_own_count():
    late, _ = one_step(Adam(0.1, eps=0.0), [[0.0]], [[1.0]], lr=0.1, step=999)
    want = 0.1 * (0.1 / (1 - 0.9**1000)) / math.sqrt(0.001 / (1 - 0.999**1000))
    assert want == pytest.approx(0.251457, abs=1e-6)
    assert -late[0, 0] == pytest.approx(want, rel=1e-6)
    rule = Adam(0.1, eps=0.0, per_row_count=True)
    own, slots = one_step(rule, [[0.0]], [[1.0]], lr=0.1, step=999)
    assert -own[0, 0] == pytest.approx(0.1, rel=1e-6)
    assert slots["count"].tolist() == [1]


def test_c05_adam_is_lazy_and_says_so():
    assert "mode **lazy**" in Adam.__doc__
    rule = Adam(0.1)
    table, slots = np.ones((5, 2), np.float32), jax.tree.map(np.array, rule.init_slots(5, 2))

    def step_on(rows, step):
        picked = {name: slot[rows] for name, slot in slots.items()}
        table[rows], new = one_step(
            rule, table[rows], np.ones((len(rows), 2)), lr=0.1, step=step, slots=picked
        )
        for name, slot in new.items():
            slots[name][rows] = slot

    step_on([3], 1)
    kept = [table[3].copy(), slots["m"][3].copy(), slots["v"][3].copy()]
    assert (kept[1] > 0).all()
    for step in range(2, 7):
        step_on([0, 4], step)
    for got, want in zip([table[3], slots["m"][3], slots["v"][3]], kept, strict=True):
        assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("step", [0, 7])
def test_c06_bias_correction_follows_the_given_step(step):
    got, _ = one_step(Adam(0.1, eps=0.0), [[0.0]], [[1.0]], lr=0.1, step=step)
    t = step + 1
    want = 0.1 * (0.1 / (1 - 0.9**t)) / math.sqrt(0.001 / (1 - 0.999**t))
    assert -got[0, 0] == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    ("decay", "w", "m", "v"),
    [({"l2": 0.1}, 0.9, 0.06, 0.00036), ({"weight_decay": 0.1}, 0.89, 0.05, 0.00025)],
    ids=["l2", "decoupled"],
)
def test_c07_l2_and_decoupled_decay_differ(decay, w, m, v):
    got, slots = one_step(Adam(0.1, eps=0.0, **decay), [[1.0]], [[0.5]], lr=0.1)
    assert got[0, 0] == pytest.approx(w, rel=1e-6)
    assert slots["m"][0, 0] == pytest.approx(m, rel=1e-6)
    assert slots["v"][0, 0] == pytest.approx(v, rel=1e-6)


@pytest.mark.parametrize("rule_class", DECAYED)
def test_c08_catch_up_reads_the_previous_last_step(rule_class):
    rule = rule_class(0.1, weight_decay=0.01, catch_up_decay=True)
    first, slots = one_step(rule, [[1.0]], [[0.0]], lr=0.1, step=3)
    assert first[0, 0] == pytest.approx(0.999, rel=1e-7)  # never touched: one factor
    assert slots["last_step"].tolist() == [3]
    second, slots = one_step(rule, first, [[0.0]], lr=0.1, step=8, slots=slots)
    assert second[0, 0] / first[0, 0] == pytest.approx(0.999**5, rel=2e-7)
    assert round(float(second[0, 0] / first[0, 0]), 5) == 0.99501
    assert slots["last_step"].tolist() == [8]
    plain = rule_class(0.1, weight_decay=0.01)
    assert "last_step" not in plain.init_slots(1, 1)
    slots = {name: slot for name, slot in slots.items() if name != "last_step"}
    got, _ = one_step(plain, first, [[0.0]], lr=0.1, step=8, slots=slots)
    assert got[0, 0] == pytest.approx(0.999**2, rel=1e-6)  # off: one factor a touch


def test_c08_catch_up_over_many_steps_and_at_the_edges():
    rule = SGD(0.1, weight_decay=1e-4, catch_up_decay=True)

    def decayed(last_step, step, lr=0.1):
        slots = {"last_step": jnp.int32([last_step])}
        return one_step(rule, [[1.0]], [[0.0]], lr=lr, step=step, slots=slots)[0][0, 0]

    for steps in (10, 1000, 10**6):
        want = (1 - 1e-5) ** steps
        oracle.assert_rows(decayed(0, steps), want, 1 - want)
    assert decayed(8, 8) == 1.0
    assert decayed(8, 2) == 1.0  # the step count was set back: never grows
    assert decayed(-1, 1000, lr=2e4) == 0.0  # lr * weight_decay = 2: stops at 0
    assert decayed(8, 8, lr=2e4) == 1.0


def test_c09_decay_leaves_absent_rows_alone():
    rule = Adagrad(0.1, l2=0.01)
    rng = np.random.default_rng(2)
    table = rng.normal(size=(1000, 4)).astype(np.float32)
    before, hit = table.copy(), [17, 900]
    picked = {name: slot[jnp.array(hit)] for name, slot in rule.init_slots(1000, 4).items()}
    table[hit], _ = one_step(rule, table[hit], np.zeros((2, 4)), lr=0.1, slots=picked)
    assert (table != before).any(axis=1).nonzero()[0].tolist() == hit
    assert (np.abs(table[hit]) < np.abs(before[hit])).all()


def test_c10_adagrad_equals_a_dense_parameter_configured_alike():
    rule = Adagrad(0.1, initial_accumulator=0.0, eps=1e-10)
    w, slots = np.float32([[1.0]]), rule.init_slots(1, 1)
    dense, accumulator = np.float64(1.0), 0.0
    for step in range(3):
        w, slots = one_step(rule, w, [[1e-7]], lr=0.1, step=step, slots=slots)
        accumulator += 1e-14
        dense -= 0.1 * 1e-7 / (math.sqrt(accumulator) + 1e-10)
    oracle.assert_rows(w[0], [dense], 1.0 - dense)
    assert "initial_accumulator=0.0, eps=1e-10" in repr(rule)
    assert "initial_accumulator=0.1, eps=1e-08" in repr(Adagrad(0.1))


def test_c10_adagrad_equals_optax_where_eps_means_the_same():
    # optax adds eps under the root, so only eps = 0 is the same formula.
    dense = optax.adagrad(0.1, initial_accumulator_value=0.0, eps=0.0)
    rule = Adagrad(0.1, initial_accumulator=0.0, eps=0.0)
    w, slots, param = np.float32([[1.0]]), rule.init_slots(1, 1), jnp.float32([[1.0]])
    state = dense.init(param)
    for step in range(3):
        w, slots = one_step(rule, w, [[1e-7]], lr=0.1, step=step, slots=slots)
        change, state = dense.update(jnp.float32([[1e-7]]), state, param)
        param = param + change
    oracle.assert_rows(w, param, 0.3)


@pytest.mark.parametrize(
    ("rule", "moves"),
    [
        (SGD(0.1), True),
        (Adagrad(0.1, initial_accumulator=0.0, eps=0.0), True),
        (RowwiseAdagrad(0.1, initial_accumulator=0.0, eps=0.0), math.sqrt(2)),
        (Adam(0.1, eps=0.0), True),
        (Adam(0.1, eps=0.0, b1=0.0, b2=0.0), True),
        (Ftrl(0.1, beta=0.0), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_c11_zero_over_zero_moves_nothing(rule, moves):
    w, slots = one_step(rule, [[0.5, 0.5], [0.5, 0.5]], [[0.0, 1.0], [0.0, 0.0]], lr=0.1)
    assert w[0, 0] == 0.5
    assert w[1].tolist() == [0.5, 0.5]
    assert w[0, 1] == pytest.approx(0.5 - 0.1 * moves, rel=1e-6)
    assert all(np.isfinite(slot).all() for slot in slots.values())
    again, _ = one_step(rule, w, [[0.0, 0.0], [0.0, 1.0]], lr=0.1, step=1, slots=slots)
    assert np.isfinite(again).all()
    assert again[:, 0].tolist() == [0.5, 0.5]


def test_c12_ftrl_accumulates_the_plain_gradient():
    w, slots = one_step(Ftrl(3.0), [[1.0]], [[0.1]], lr=3.0)
    z = 0.1 - 0.1 / 3.0
    assert slots["n"][0, 0] == np.float32(0.1) * np.float32(0.1)
    assert slots["n"][0, 0] == pytest.approx(0.01, rel=1e-7)
    assert slots["z"][0, 0] == pytest.approx(z, rel=1e-6)
    assert w[0, 0] == pytest.approx(-z / ((1.0 + 0.1) / 3.0), rel=1e-6)


def test_c19_accumulator_is_float32():
    rule, lr = Adagrad(0.1, initial_accumulator=1.0), jnp.full((1, 1), 0.1)

    def step(i, carry):
        w, slots = carry
        return rule.update(w, slots, jnp.full((1, 1), 0.01), lr, i)

    _, slots = jax.lax.fori_loop(0, 1000, step, (jnp.zeros((1, 1)), rule.init_slots(1, 1)))
    assert slots["accumulator"].dtype == jnp.float32
    assert float(slots["accumulator"][0, 0]) == pytest.approx(1.1, rel=2e-5)


def test_bad_values_reach_only_their_row():  # field case C21 builds on it
    for rule in (SGD(0.1), Adagrad(0.1), RowwiseAdagrad(0.1), Adam(0.1), Ftrl(0.1)):
        w, slots = one_step(rule, np.ones((2, 1)), [[np.nan], [1.0]], lr=0.1)
        assert np.isnan(w[0, 0])  # not hidden by the guard for 0/0
        assert np.isfinite(w[1]).all()
        assert all(np.isfinite(slot[1]).all() for slot in slots.values())


# ---- FTRL's edges -----------------------------------------------------------------------------


def test_ftrl_l1_makes_exact_zeros():
    w, _ = one_step(Ftrl(0.1, l1=0.5), np.zeros((1, 3)), [[0.4, -0.5, 0.6]], lr=0.1)
    assert w[0, :2].tolist() == [0.0, 0.0]
    assert w[0, 2] == pytest.approx(-0.1 / (1.6 / 0.1), rel=1e-5)


def test_ftrl_with_learning_rate_zero_moves_nothing():  # the first step of a warm-up
    rule = Ftrl(0.1)
    w, slots = one_step(rule, [[0.5]], [[1.0]], lr=0.0)
    assert w[0, 0] == 0.5
    assert [slots[name][0, 0] for name in ("z", "n")] == [0.0, 0.0]


# ---- what a rule is ---------------------------------------------------------------------------


@pytest.mark.parametrize("rule_class", RULES.values())
def test_rules_compare_by_all_but_a_float_rate(rule_class):
    rule = rule_class(0.1)
    assert isinstance(rule, SparseOptimizer)
    assert rule == rule_class(0.2)
    assert hash(rule) == hash(rule_class(0.2))
    assert rule != rule_class(0.1, l2=0.5)
    first, second = optax.constant_schedule(0.1), optax.constant_schedule(0.2)
    assert rule_class(first) == rule_class(first)
    assert len({rule, rule_class(first), rule_class(second)}) == 3
    assert dataclasses.replace(rule_class(first), learning_rate=0.3) == rule
    assert dataclasses.replace(rule, l2=0.5).learning_rate == 0.1


def test_a_new_float_rate_compiles_nothing():
    traces = []

    @jax.jit(static_argnums=0)
    def counted(rule, w, lr):
        traces.append(rule)
        return rule.update(w, {}, w, lr, jnp.int32(0))[0]

    for rate in (0.1, 0.2):
        counted(SGD(rate), jnp.ones((1, 1)), jnp.full((1, 1), rate))
    assert len(traces) == 1


@pytest.mark.parametrize("base", [0.5, 0.9, 0.999, 0.99999])
def test_one_minus_power_is_right_to_float32(base):
    steps = np.array([1, 2, 7, 1000, 10**6], np.int32)
    got = one_minus_power(base, jnp.asarray(steps))
    want = [-math.expm1(int(step) * math.log(base)) for step in steps]
    np.testing.assert_allclose(got, want, rtol=5e-7)
    assert one_minus_power(0.0, jnp.int32([1, 5])).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: SGD(-1),
            ValueError,
            r"SGD: learning_rate must be a finite float >= 0 or a schedule of the int32 step, "
            r"got -1",
        ),
        (lambda: SGD("0.1"), TypeError, r"SGD: learning_rate must be .* got '0.1'"),
        (lambda: SGD(True), TypeError, r"SGD: learning_rate must be .* got True"),
        (lambda: Adam(math.nan), ValueError, r"Adam: learning_rate must be .* got nan"),
        (lambda: Ftrl(math.inf), ValueError, r"Ftrl: learning_rate must be .* got inf"),
        (
            lambda: Adagrad(0.1, eps=-1e-8),
            ValueError,
            r"Adagrad: eps must be a finite float >= 0, got -1e-08",
        ),
        (
            lambda: Adagrad(0.1, initial_accumulator=-1.0),
            ValueError,
            r"Adagrad: initial_accumulator must be a finite float >= 0, got -1.0",
        ),
        (
            lambda: RowwiseAdagrad(0.1, initial_accumulator=None),
            TypeError,
            r"RowwiseAdagrad: initial_accumulator must be a finite float >= 0, got None",
        ),
        (
            lambda: Adam(0.1, b1=1.0),
            ValueError,
            r"Adam: b1 must be a finite float >= 0 and < 1, got 1.0",
        ),
        (lambda: Adam(0.1, b2=-0.1), ValueError, r"Adam: b2 must be .* got -0.1"),
        (
            lambda: Adam(0.1, per_row_count=1),
            TypeError,
            r"Adam: per_row_count must be True or False, got 1",
        ),
        (lambda: Ftrl(0.1, l1=-1), ValueError, r"Ftrl: l1 must be a finite float >= 0, got -1"),
        (lambda: SGD(0.1, l2=-1), ValueError, r"SGD: l2 must be a finite float >= 0, got -1"),
        (lambda: SGD(0.1, weight_decay=-1), ValueError, r"SGD: weight_decay must be .* got -1"),
        (
            lambda: SGD(0.1, l2=0.1, catch_up_decay=True),
            ValueError,
            r"SGD: catch_up_decay=True needs weight_decay > 0, got 0.0; only decoupled decay",
        ),
    ],
)
def test_bad_hyperparameters_are_named(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_hyperparameters_become_python_floats():
    rule = Adam(np.float32(0.5), b1=0, eps=np.float64(0.25))
    assert (rule.learning_rate, rule.b1, rule.eps) == (0.5, 0.0, 0.25)
    assert {type(value) for value in (rule.learning_rate, rule.b1, rule.eps)} == {float}
