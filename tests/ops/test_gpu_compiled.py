# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels as compiled for an H200 and an A100: wide accesses, in place, no spills."""

from __future__ import annotations

import json

import pytest

from tests.gpu_target import run_for_gpu

pytestmark = pytest.mark.gpu_compile

KERNELS = {
    "bag": {"embedding_bag", "embedding_bag_blocks_1", "embedding_bag_blocks_2"},
    "huge": {"embedding_bag", "embedding_bag_blocks_1", "embedding_bag_blocks_2"},
    "gather": {"embedding_gather"},
    "sums": {"bag_gradients", "bag_gradients_blocks_1", "bag_gradients_blocks_2"},
    "update": {"row_update"},
    "count": {"count_not_finite"},
    "dots": {"dot_interaction", "dot_interaction_grads"},
    "unique": {"unique_count", "unique_write"},
}
"""Functions of a program, by the first word of its name."""

OURS = set().union(*KERNELS.values())


@pytest.fixture(scope="module", params=["H200", "A100"])
def facts(request):
    """Of all programs: one process compiles them for one kind of GPU."""
    program = f"from tests import compiled_kernels as c; c.print_facts({request.param!r})"
    return json.loads(run_for_gpu(program))


def kernels(fact):
    """Ours among the functions of a program."""
    return {name: told for name, told in fact["kernels"].items() if name in OURS}


def test_the_kernels_are_what_runs(facts):
    for name, fact in facts.items():
        assert set(kernels(fact)) == KERNELS[name.partition("_")[0]], name


def test_nothing_spills_and_nothing_is_added_atomically(facts):
    for name, fact in facts.items():
        for kernel, told in kernels(fact).items():
            # Without ptxas only what the compiler before it keeps in memory is known.
            assert not told["depot"], (name, kernel)
            assert told.get("spilled_bytes", 0) == 0, (name, kernel)
            assert told["atomics"] == 0, (name, kernel)
        assert "scatter" not in fact["opcodes"], name


def test_rows_are_moved_sixteen_bytes_at_a_time(facts):
    seen = set()
    for name, fact in facts.items():
        *_, dtype, dim = name.split("_")
        if name.startswith(("unique", "count")) or int(dim) % (8 if dtype == "bfloat16" else 4):
            continue
        for kernel, told in kernels(fact).items():
            wide = {access.split(".")[0] for access in told["accesses"] if ".v4." in access}
            # The dots of a sample are of an odd number and lie where pairs do.
            assert wide >= ({"ld"} if kernel == "dot_interaction" else {"ld", "st"}), (name, kernel)
            seen.add(kernel)
    assert seen == OURS - {"unique_count", "unique_write", "count_not_finite"}


def test_slab_and_slots_are_updated_in_place(facts):
    updates = [name for name in facts if name.startswith("update")]
    assert len(updates) == 12
    for name in updates:
        fact = facts[name]
        assert fact["aliased_bytes"] == fact["state_bytes"] > 0, name
        assert "copy" not in fact["opcodes"], name
        # A rate and a noise row of each of 5000 entries.
        assert fact["temporary_bytes"] < 50_000, name


def test_addresses_past_2_31_elements_are_64_bit(facts):
    def products(name, kernel):
        return facts[name]["kernels"][kernel]["wide"]

    for kernel in ("embedding_bag", "embedding_bag_blocks_1"):
        assert products("huge_float32_100", kernel) > 0
        assert products("bag_float32_100", kernel) == 0
    assert products("update_adagrad_float32_100", "row_update") > 0


def test_what_follows_the_sort_is_two_kernels(facts):
    counts = facts["unique_int32_1"]["opcodes"]
    assert counts["custom-call"] == 2
    # Rows out of range are set to R before the sort, and the second key of the sort is counted.
    assert counts["fusion"] <= 2
