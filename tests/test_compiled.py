# SPDX-License-Identifier: Apache-2.0
"""Promise 6, read off the compiled train step, for CPU and for 8 H200 that are not there.

No table-shaped gradient, no table-sized copy, temporaries that do not know the size of a table,
state updated in place, and as many collectives for 100 features as for 13.
"""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.ops.native import library
from tests import compiled_checks as checks
from tests import compiled_models as models
from tests import program_cache
from tests.combinations import make_mesh
from tests.gpu_target import run_for_gpu
from tests.program_text import count_collectives

SLOW = pytest.mark.slow


def check_pair(small, large, num_devices, slack_bytes=0):
    """All checks of a step and of the same step with ten times the rows."""
    for fact in (small, large):
        checks.check_no_table_is_made(fact)
        checks.check_aliased(fact)
        checks.check_collectives(fact, num_devices)
    checks.check_same_temporaries(small, large, slack_bytes)


# ---- CPU --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh_name", "program"),
    [
        ("1", models.every_rule),
        ("4", models.every_rule),
        ("4", models.every_placement),
        pytest.param("2x4", models.every_rule, marks=SLOW),
        *[pytest.param(m, models.every_placement, marks=SLOW) for m in ("1", "2x4")],
    ],
)
def test_no_table_is_copied_or_made(mesh_name, program):
    mesh = make_mesh(mesh_name)
    small, large = (checks.facts(*program(mesh, factor)) for factor in (1, 10))
    check_pair(small, large, mesh.size)


@pytest.mark.slow
@pytest.mark.parametrize("rule", models.RULES)
@pytest.mark.parametrize("mesh_name", ["1", "8"])
def test_no_table_is_copied_or_made_by_a_rule_alone(mesh_name, rule):
    mesh = make_mesh(mesh_name)
    small, large = (checks.facts(*models.one_rule(mesh, rule, factor)) for factor in (1, 10))
    check_pair(small, large, mesh.size)


@pytest.mark.xfail(
    jax.__version_info__ < (0, 12) and not library.is_available(),
    reason="XLA for CPU has no bfloat16 scatter: it converts the table to float32 and back",
    raises=AssertionError,
)
def test_no_bfloat16_table_is_copied():
    mesh = make_mesh("4")
    small, large = (checks.facts(*models.bfloat16(mesh, factor)) for factor in (1, 10))
    check_pair(small, large, mesh.size)


def check_equal_collectives(facts, num_devices):
    """All checks of steps that differ in the number of features of their two slabs."""
    for fact in facts:
        checks.check_collectives(fact, num_devices)
        checks.check_no_table_is_made(fact)
    counts = [count_collectives(fact) for fact in facts]
    assert all(count == counts[0] for count in counts), counts
    assert counts[0]["all-to-all"] == 3


@pytest.mark.parametrize(
    ("mesh_name", "num_features"),
    [
        ("4", models.NUM_FEATURES[:2]),
        pytest.param("4", models.NUM_FEATURES[1:], marks=SLOW),
        pytest.param("2x4", models.NUM_FEATURES[::2], marks=SLOW),
    ],
)
def test_collectives_do_not_grow_with_features(mesh_name, num_features):
    mesh = make_mesh(mesh_name)
    facts = [checks.facts(*models.many_features(mesh, count)) for count in num_features]
    check_equal_collectives(facts, mesh.size)


def test_the_arguments_stand_for_the_real_ones(monkeypatch):
    """What is compiled here from shapes is the program that a trainer runs."""
    monkeypatch.setattr(models, "MIN_ROWS", 2000)
    emb, columns = models.bfloat16(make_mesh("4"), 1)
    trainer = checks.make_trainer(emb)
    dense = np.zeros((models.BATCH, models.NUM_DENSE), np.float32)
    batch = js.Batch(columns, dense, dense[:, 0])
    real = trainer.init(jax.random.key(0)), trainer.pack(batch)
    shapes = checks.abstract_state(trainer), checks.abstract_batch(emb, columns)
    assert jax.tree.structure(real) == jax.tree.structure(shapes)
    for array, shape in zip(jax.tree.leaves(real), jax.tree.leaves(shapes), strict=True):
        assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
        assert array.sharding.is_equivalent_to(shape.sharding, array.ndim)


# ---- what the checks find ---------------------------------------------------------------------


def compiled_fact(function, *, num_updates=1):
    """The fact of a function of a table ``[MIN_ROWS, 4]``, rows ``[8]`` and values ``[8, 4]``."""
    shapes = [((models.MIN_ROWS, 4), np.float32), ((8,), np.int32), ((8, 4), np.float32)]
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    with program_cache.switched_off():
        compiled = jax.jit(function, donate_argnums=0).lower(*arguments).compile()
    array = {"name": "table", "bytes": models.MIN_ROWS * 16, "moved": True}
    return {
        "text": compiled.as_text(),
        "min_rows": models.MIN_ROWS,
        "arrays": [array] * num_updates,
        "aliased_bytes": compiled.memory_analysis().alias_size_in_bytes,
    }


def test_the_check_accepts_an_update_in_place():
    fact = compiled_fact(lambda table, rows, values: table.at[rows].set(values))
    checks.check_no_table_is_made(fact)
    checks.check_aliased(fact)


@pytest.mark.parametrize(
    "bad",
    [
        # A read of the old table that waits for the update: XLA copies the table.
        lambda table, rows, values: (table.at[rows].set(values), table.sum()),
        lambda table, rows, values: table + table.at[rows].set(values),
        # A gradient of the table's shape.
        lambda table, rows, values: table - 0.1 * jax.numpy.zeros_like(table).at[rows].add(values),
        lambda table, rows, values: table * 0.5,
        lambda table, rows, values: jax.numpy.flip(table).at[rows].set(values),
        # Two updates where one is due.
        lambda table, rows, values: table.at[rows].set(values).at[rows + 1].set(values),
    ],
)
def test_the_check_finds_table_sized_work(bad):
    with pytest.raises(AssertionError, match=r"table-sized values are made|updates of"):
        checks.check_no_table_is_made(compiled_fact(bad))


def test_the_check_finds_a_table_that_is_not_aliased():
    shape = jax.ShapeDtypeStruct((models.MIN_ROWS, 4), np.float32)
    with program_cache.switched_off():
        compiled = jax.jit(lambda table: table.at[0].set(1)).lower(shape).compile()
    memory = compiled.memory_analysis()
    fact = {
        "text": compiled.as_text(),
        "min_rows": models.MIN_ROWS,
        "arrays": [{"bytes": models.MIN_ROWS * 16}],
        "aliased_bytes": memory.alias_size_in_bytes,
    }
    with pytest.raises(AssertionError):
        checks.check_aliased(fact)
    with pytest.raises(AssertionError, match="are not aliased"):
        checks.check_aliased({**fact, "aliased_bytes": models.MIN_ROWS * 16})


# ---- 8 x H200 ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu():
    """Facts of all programs: one process compiles them."""
    return json.loads(run_for_gpu("from tests import compiled_checks as c; c.print_gpu_facts()"))


@pytest.mark.gpu_compile
@pytest.mark.parametrize("rule", models.RULES)
def test_no_table_is_copied_or_made_on_h200(gpu, rule):
    check_pair(gpu[f"{rule} x1"], gpu[f"{rule} x10"], 8)


@pytest.mark.gpu_compile
@pytest.mark.parametrize("program", ["every_placement", "bfloat16"])
def test_no_table_of_any_placement_is_copied_or_made_on_h200(gpu, program):
    check_pair(gpu[f"{program} x1"], gpu[f"{program} x10"], 8, checks.GPU_SLACK_BYTES)


@pytest.mark.gpu_compile
def test_two_axes_change_only_the_route_on_h200(gpu):
    fact = gpu["2x4"]
    checks.check_no_table_is_made(fact)
    checks.check_aliased(fact)
    checks.check_collectives(fact, 8)
    one_axis = gpu["bfloat16 x1"]
    assert count_collectives(fact) == count_collectives(one_axis)


@pytest.mark.gpu_compile
def test_collectives_do_not_grow_with_features_on_h200(gpu):
    check_equal_collectives([gpu[f"{count} features"] for count in models.NUM_FEATURES], 8)
