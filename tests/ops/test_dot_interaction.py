# SPDX-License-Identifier: Apache-2.0
"""Pairwise dots: every implementation against the reference and numpy float64, and its program."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse.ops.dot_interaction import dot_interaction
from jaxsparse.ops.dot_interaction.cases import SHAPES
from jaxsparse.ops.dot_interaction.reference import dot_interaction_reference
from jaxsparse.ops.native import library

CHUNK = 64
"""Columns that the native kernel sums before it adds the sums."""


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def implementations():
    return ("xla", "native") if library.is_available() else ("xla",)


needs_native = pytest.mark.skipif(
    not library.is_available(), reason=f"no native kernels: {library.why_not()}"
)


def draw(shape, seed=0):
    """F arrays ``[b, D]`` and weights of the dots."""
    rng = np.random.default_rng(seed)
    samples, count, dim = shape
    vectors = tuple(rng.normal(size=(count, samples, dim)).astype(np.float32))
    weights = rng.normal(size=(samples, count * (count - 1) // 2)).astype(np.float32)
    return vectors, weights


def dots_and_grads(run, vectors, weights):
    dots, pull_back = jax.vjp(run, vectors)
    return dots, pull_back(weights)[0]


def exact(vectors, weights):
    """The same in float64, and the sums of the terms' sizes, which rounding is measured by."""
    stacked = np.stack(vectors, axis=1).astype(np.float64)
    samples, count, _ = stacked.shape
    row, column = np.tril_indices(count, -1)
    square = np.zeros((samples, count, count))
    square[:, row, column] = square[:, column, row] = weights
    values, sizes = [], []
    for v, w in ((stacked, square), (np.abs(stacked), np.abs(square))):
        dots = np.einsum("bfd,bgd->bfg", v, v)[:, row, column]
        (values if not values else sizes).extend((dots, np.einsum("bfg,bgd->fbd", w, v)))
    return values, sizes


def test_all_implementations_equal_the_reference():
    drawn = {name: draw(shape) for name, shape in SHAPES.items()}
    small = [name for name, (_, count, _) in SHAPES.items() if count < 10]

    # One program for all shapes: compiling is what takes time.
    @jax.jit
    def together(cases):
        found = {
            (name, which): dots_and_grads(partial(dot_interaction, implementation=which), *case)
            for name, case in cases.items()
            for which in implementations()
        }
        wanted = {name: dots_and_grads(dot_interaction_reference, *cases[name]) for name in small}
        return found, wanted

    found, wanted = together(drawn)
    for (name, which), (dots, grads) in found.items():
        vectors, weights = drawn[name]
        values, sizes = exact(vectors, weights)
        if name in small:
            for got, want in zip((dots, grads), wanted[name], strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
        for got, value, size in zip((dots, np.asarray(grads)), values, sizes, strict=True):
            assert got.shape == value.shape and got.dtype == np.float32
            assert (np.abs(got - value) <= 4e-6 * size).all(), (name, which)


@needs_native
@pytest.mark.parametrize("name", ["edges", "odd"])
def test_native_sums_are_in_the_promised_order(name):
    """To the bit, as float32 in numpy: whatever the instruction set and the number of threads."""
    vectors, weights = draw(SHAPES[name], seed=1)
    native = partial(dot_interaction, implementation="native")
    dots, grads = dots_and_grads(native, vectors, weights)
    samples, count, dim = SHAPES[name]
    row, column = np.tril_indices(count, -1)
    stacked = np.stack(vectors)
    total = np.zeros((len(row), samples), np.float32)
    for start in range(0, dim, CHUNK):
        part = np.zeros_like(total)
        for d in range(start, min(start + CHUNK, dim)):
            part += stacked[row, :, d] * stacked[column, :, d]
        total = part if start == 0 else total + part
    np.testing.assert_array_equal(dots, total.T)
    square = np.zeros((samples, count, count), np.float32)
    square[:, row, column] = square[:, column, row] = weights
    want = np.zeros_like(stacked)
    for g in range(count):
        want += square[:, :, g].T[:, :, None] * stacked[g][None]
    np.testing.assert_array_equal(np.asarray(grads), want)


@pytest.mark.parametrize("which", ["xla", "native"])
def test_program_holds_what_was_asked_for(which):
    if which not in implementations():
        pytest.skip(library.why_not())
    vectors, weights = draw((4, 3, 5))

    def calls(chosen):
        run = jax.jit(partial(dots_and_grads, partial(dot_interaction, implementation=chosen)))
        text = run.lower(vectors, weights).as_text()
        names = re.findall(r"custom_call @(jaxsparse\w+)", text)
        return sorted(names), text.count("stablehlo.dot_general")

    both = ["jaxsparse_dot_interaction", "jaxsparse_dot_interaction_grad"]
    names, products = calls(which)
    assert names == (both if which == "native" else [])
    assert (products > 0) == (which == "xla")
    best = calls(None)
    assert best[0] == (both if "native" in implementations() else [])
    assert (best[1] > 0) == ("native" not in implementations())


def test_runs_on_several_devices_at_once(devices):
    mesh = js.make_mesh(devices=devices[:4])
    vectors, weights = draw((64, 6, 20))
    run = partial(dots_and_grads, dot_interaction)
    cut = P("shard")
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(cut, cut), out_specs=cut)
    dots, grads = jax.jit(sharded)(vectors, weights)
    want, want_grads = jax.jit(run)(vectors, weights)
    np.testing.assert_allclose(dots, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grads, want_grads, rtol=1e-5, atol=1e-5)


def test_vmap_and_second_derivatives():
    vectors, weights = draw((6, 3, 4))
    pairs = tuple(vector.reshape(2, 3, 4) for vector in vectors)
    mapped = jax.vmap(partial(dots_and_grads, dot_interaction))(pairs, weights.reshape(2, 3, 3))
    dots, grads = dots_and_grads(dot_interaction, vectors, weights)
    np.testing.assert_allclose(mapped[0].reshape(6, 3), dots, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        np.asarray(mapped[1]).reshape(3, 6, 4), np.asarray(grads), rtol=1e-5, atol=1e-5
    )

    def penalty(run, v):
        """Needs the derivatives of gradients by the vectors and by the weights."""
        grads = jax.grad(lambda v: (run(v) ** 3).sum())(v)
        return sum((grad**2).sum() for grad in grads)

    got, want = jax.jit(
        lambda v: [
            jax.grad(partial(penalty, run))(v)
            for run in (dot_interaction, dot_interaction_reference)
        ]
    )(vectors)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-2)


def test_other_dtypes_run_on_xla():
    vectors = tuple(jnp.asarray(v, jnp.bfloat16) for v in draw((4, 3, 5))[0])
    dots = dot_interaction(vectors)
    assert dots.dtype == jnp.bfloat16 and dots.shape == (4, 3)
    message = "implementation 'native' takes float32, got bfloat16; cast the vectors, or use 'xla'"
    with pytest.raises(ValueError, match=re.escape(f"dot_interaction: {message}")):
        dot_interaction(vectors, implementation="native")


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ((), "vectors is empty, expected at least one"),
        ((np.zeros(3, np.float32),), "must be [b, D] and all alike, got float32 [3]"),
        (
            (np.zeros((3, 2), np.float32), np.zeros((3, 4), np.float32)),
            "must be [b, D] and all alike, got float32 [3, 2], float32 [3, 4]",
        ),
    ],
)
def test_errors(vectors, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dot_interaction(vectors)


def test_an_implementation_that_is_not_there_is_refused(monkeypatch):
    vectors, _ = draw((2, 3, 4))
    with pytest.raises(ValueError, match="dot_interaction: there is no implementation 'fast'"):
        dot_interaction(vectors, implementation="fast")
    monkeypatch.setattr(library, "_loaded", lambda: "no compiler")
    with pytest.raises(RuntimeError, match="implementation 'native' is not there: no compiler"):
        dot_interaction(vectors, implementation="native")
    np.testing.assert_allclose(
        dot_interaction(vectors), dot_interaction_reference(vectors), rtol=1e-5, atol=1e-5
    )
