# SPDX-License-Identifier: Apache-2.0
"""A whole DLRM step as compiled for one and two nodes of eight H200, and for A100: its kernels, its
memory, and what runs beside its exchanges."""

from __future__ import annotations

import json
import re

import pytest

from tests import compiled_checks as checks
from tests.gpu_target import run_for_gpu
from tests.program_text import instructions

pytestmark = pytest.mark.gpu_compile

KERNELS = {
    "embedding_gather",
    "bag_gradients",
    "unique_count",
    "unique_write",
    "count_not_finite",
    "row_update",
    "dot_interaction",
    "dot_interaction_grads",
}
NUM_DEVICES = {"1x8": 8, "2x8": 16, "A100": 8}


@pytest.fixture(scope="module")
def steps():
    """Facts of all steps: one process compiles them."""
    return json.loads(run_for_gpu("from tests import step_on_gpus as s; s.print_facts()"))


@pytest.fixture(params=NUM_DEVICES)
def step(steps, request):
    return steps[request.param]


def test_our_kernels_are_in_it_and_spill_nothing(step):
    assert set(step["kernels"]) >= KERNELS
    for name, told in step["kernels"].items():
        if name.partition("__")[0] in KERNELS:
            assert not told["depot"], name
            assert told.get("spilled_bytes", 0) == 0, name
            assert told["atomics"] == 0, name


def test_rows_of_64_columns_are_moved_sixteen_bytes_at_a_time(step):
    for name in KERNELS - {"unique_count", "unique_write"}:
        wide = {a.split(".")[0] for a in step["kernels"][name]["accesses"] if ".v4." in a}
        # One counts, the other stores dots, which are odd in number.
        only_reads = name in ("count_not_finite", "dot_interaction")
        assert wide >= ({"ld"} if only_reads else {"ld", "st"}), name


def test_tables_are_updated_in_place(step):
    checks.check_no_table_is_made(step)
    checks.check_aliased(step)


@pytest.mark.parametrize("name", ["1x8", "2x8"])
def test_temporaries_do_not_know_the_size_of_a_table(steps, name):
    checks.check_same_temporaries(steps[name], steps[f"{name} x10"])


@pytest.mark.parametrize("name", NUM_DEVICES)
def test_dense_dots_run_beside_the_exchanges(steps, name):
    checks.check_collectives(steps[name], NUM_DEVICES[name])
    addresses, vectors, gradients = steps[name]["overlap"]
    assert addresses["result"].startswith("((s32[")
    assert vectors["result"].startswith("((f32[") and vectors["dots"] >= 1
    assert gradients["result"].startswith("((f32[")
    # XLA's estimates for A100 make it fill that time with smaller work.
    assert gradients["dots"] >= (0 if name == "A100" else 1)


def test_nothing_is_scattered_and_no_64_bits_are_sorted(step):
    opcodes = [i.opcode for i in instructions(step["text"])]
    assert "scatter" not in opcodes
    sorts = [i for i in instructions(step["text"]) if i.opcode == "sort"]
    assert not [i.line for i in sorts if re.search(r"\b[suf]64\[", i.line)]
    # Owners sort the rows that are asked of them, once.
    assert len(sorts) == 1


def test_overlap_counts_the_dots_between_start_and_done():
    from tests.step_on_gpus import overlap

    text = """HloModule m
%c { ROOT %d = f32[] constant(0)
}

ENTRY %main {
  %p = f32[8]{0} parameter(0)
  %s = ((f32[8]{0}), f32[8]{0}) all-to-all-start(%p), channel_id=1
  %g = f32[4]{0} fusion(%p), kind=kCustom, calls=%gemm_fusion_dot.1_computation
  %b = f32[4]{0} bitcast(%gemm_fusion_dot)
  %e = f32[8]{0} all-to-all-done(%s)
  ROOT %h = f32[4]{0} fusion(%e), kind=kCustom, calls=%gemm_fusion_dot.2_computation
}
"""
    assert [exchange["dots"] for exchange in overlap(text)] == [1]
