# SPDX-License-Identifier: Apache-2.0
"""Rounding to bfloat16 at random: every implementation to the bit, its mean, and its noise."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsparse.ops.native import library
from jaxsparse.ops.quantize import dequantize_int8, quantize_int8, stochastic_round_bf16
from jaxsparse.ops.quantize.cases import SHAPES, values_of_every_size
from jaxsparse.ops.quantize.reference import (
    dequantize_int8_reference,
    noise_reference,
    quantize_int8_reference,
    stochastic_round_bf16_reference,
)

SEED = 0xFFFFFFF0
"""Past int32."""


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def implementations():
    return ("xla", "native") if library.is_available() else ("xla",)


def as_float(rounded):
    return np.asarray(rounded).astype(np.float64)


def test_all_implementations_write_the_bits_of_the_reference():
    rng = np.random.default_rng(0)
    drawn = {
        name: (values_of_every_size(rng, shape), rng.integers(-(2**31), 2**31, shape[0]))
        for name, shape in SHAPES.items()
    }
    # One program for all shapes and implementations: compiling is what takes time.
    together = jax.jit(
        lambda cases: {
            (name, which): stochastic_round_bf16(*case, SEED, 7, implementation=which)
            for name, case in cases.items()
            for which in implementations()
        }
    )
    found = together({n: (v, rows.astype(np.int32)) for n, (v, rows) in drawn.items()})
    for (name, which), got in found.items():
        values, rows = drawn[name]
        want = stochastic_round_bf16_reference(values, rows, SEED, 7)
        assert got.shape == values.shape and got.dtype == jnp.bfloat16
        bits, numbers = np.asarray(got).view(np.uint16), ~np.isnan(values)
        np.testing.assert_array_equal(
            bits[numbers], want.view(np.uint16)[numbers], err_msg=f"{name} {which}"
        )
        np.testing.assert_array_equal(np.isnan(as_float(got)), ~numbers)


def test_rounds_to_a_neighbour_and_leaves_what_fits():
    rng = np.random.default_rng(1)
    values = values_of_every_size(rng, (400, 16))
    values[np.isnan(values)] = 1
    got = as_float(stochastic_round_bf16(values, jnp.arange(400), 1, 2))
    cut = values.view(np.uint32) & np.uint32(0xFFFF0000)
    toward_zero = cut.view(np.float32).astype(np.float64)
    fits = toward_zero == values
    assert fits.sum() > 5 and np.isinf(values).sum() == 2
    np.testing.assert_array_equal(got[fits], values[fits])
    away = (cut[~fits] + np.uint32(0x10000)).view(np.float32)
    assert ((got[~fits] == toward_zero[~fits]) | (got[~fits] == away)).all()


@pytest.mark.parametrize("which", ["xla", "native"])
def test_program_holds_what_was_asked_for(which):
    if which not in implementations():
        pytest.skip(library.why_not())
    values, rows = jnp.ones((4, 3)), jnp.arange(4)

    def text(chosen):
        run = jax.jit(partial(stochastic_round_bf16, implementation=chosen))
        return run.lower(values, rows, 0, 0).as_text()

    assert ("jaxsparse_stochastic_round" in text(which)) == (which == "native")
    assert ("jaxsparse_stochastic_round" in text(None)) == ("native" in implementations())


@pytest.mark.parametrize("start", [1.0, -0.3, 1e-30])
def test_small_updates_are_not_lost(start):
    """bfloat16 near 1 lies 1/128 apart; a hundred updates of 1/10,000 would all be lost."""
    update = np.float32(abs(start) * 1e-4)
    rows = jnp.arange(500)

    def move(step, weights):
        moved = weights.astype(jnp.float32) + update
        return stochastic_round_bf16(moved, rows, 3, step)

    weights = jnp.full((500, 16), start, jnp.bfloat16)
    begun = as_float(weights)
    run = jax.jit(lambda first, last, w: jax.lax.fori_loop(first, last, move, w))
    moved = as_float(run(0, 100, weights))
    assert abs((moved - begun).mean() - 100 * float(update)) < 0.003 * abs(start)
    np.testing.assert_array_equal(as_float(jnp.bfloat16(begun) + jnp.bfloat16(update)), begun)
    # Resumed half-way: the noise is a function of the step, and the bits are the same.
    resumed = run(50, 100, run(0, 50, weights))
    np.testing.assert_array_equal(as_float(resumed), moved)


def test_noise_is_uniform_and_differs_by_seed_step_row_and_column():
    rows, dim = np.arange(10_000), 8
    first = noise_reference(rows, dim, seed=5, step=9)
    others = {
        "seed": noise_reference(rows, dim, seed=6, step=9),
        "step": noise_reference(rows, dim, seed=5, step=10),
        "seed for step": noise_reference(rows, dim, seed=9, step=5),
        "row": np.roll(first, 1, axis=0),
        "column": np.roll(first, 1, axis=1),
        "row and column": np.roll(first, (1, 1), axis=(0, 1)),
        "far row": noise_reference(rows + 2**20, dim, seed=5, step=9),
    }
    for name, other in others.items():
        for column in range(dim):
            correlation = np.corrcoef(first[:, column], other[:, column])[0, 1]
            assert abs(correlation) < 0.05, (name, column, correlation)
    counts = np.bincount((first.ravel() // 2**12).astype(np.int64), minlength=16)
    assert np.abs(counts - first.size / 16).max() < 5 * np.sqrt(first.size / 16)
    assert abs(first.mean() - (2**16 - 1) / 2) < 5 * 2**16 / np.sqrt(12 * first.size)


def test_int8_by_row():
    rng = np.random.default_rng(2)
    values = rng.normal(size=(50, 33)).astype(np.float32) * 10.0 ** rng.integers(-9, 9, (50, 1))
    values = values.astype(np.float32)
    values[0] = 4.25
    values[1] = np.linspace(-3.4e38, 3.4e38, 33)
    values[2, 5], values[3, 6] = np.nan, -np.inf
    codes, scales, offsets = jax.jit(quantize_int8)(values)
    assert (codes.dtype, scales.dtype, offsets.dtype) == (jnp.int8, jnp.float32, jnp.float32)
    want_codes, want_scales, want_offsets = quantize_int8_reference(values)
    # A place half-way between two codes may go either way.
    assert np.abs(np.asarray(codes, np.int64) - want_codes).max() <= 1
    np.testing.assert_allclose(scales, want_scales, rtol=1e-5)
    np.testing.assert_array_equal(offsets, want_offsets)
    back = np.asarray(jax.jit(dequantize_int8)(codes, scales, offsets))
    exact = dequantize_int8_reference(*map(np.asarray, (codes, scales, offsets)))
    kept = np.isfinite(values).all(axis=1)
    assert np.isnan(back[~kept]).all() and np.isnan(exact[~kept]).all()
    np.testing.assert_array_equal(back[0], values[0])
    largest = np.abs(values[kept]).max(axis=1, keepdims=True)
    assert (np.abs(back[kept] - exact[kept]) <= 1e-6 * largest).all()
    half_a_step = np.asarray(scales)[kept, None].astype(np.float64) / 2
    error = np.abs(back[kept].astype(np.float64) - values[kept])
    assert (error <= half_a_step + 1e-5 * largest).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((jnp.ones(3), jnp.arange(3)), "values must be float32 [K, D], got float32 [3]"),
        (
            (jnp.ones((3, 2), jnp.bfloat16), jnp.arange(3)),
            "values must be float32 [K, D], got bfloat16 [3, 2]",
        ),
        (
            (jnp.ones((3, 2)), jnp.arange(2)),
            "rows must be int32 or uint32 [3], got int32 [2]",
        ),
        (
            (jnp.ones((3, 2)), jnp.ones(3)),
            "rows must be int32 or uint32 [3], got float32 [3]",
        ),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=re.escape(f"stochastic_round_bf16: {message}")):
        stochastic_round_bf16(*arguments, 0, 0)


def test_an_implementation_that_is_not_there_is_refused(monkeypatch):
    values, rows = jnp.ones((3, 2)), jnp.arange(3)
    message = "there is no implementation 'triton', expected one of 'native', 'xla', or None"
    with pytest.raises(ValueError, match=re.escape(message)):
        stochastic_round_bf16(values, rows, 0, 0, implementation="triton")
    monkeypatch.setattr(library, "_loaded", lambda: "no compiler")
    with pytest.raises(RuntimeError, match="implementation 'native' is not there: no compiler"):
        stochastic_round_bf16(values, rows, 0, 0, implementation="native")
    np.testing.assert_array_equal(as_float(stochastic_round_bf16(values, rows, 0, 0)), 1)
