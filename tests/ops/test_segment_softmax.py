# SPDX-License-Identifier: Apache-2.0
"""Softmax within segments: every implementation against the reference and numpy float64."""

from __future__ import annotations

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse.ops.native import library
from jaxsparse.ops.segment_softmax import segment_softmax
from jaxsparse.ops.segment_softmax.cases import LENGTHS, PADDING, draw_segments
from jaxsparse.ops.segment_softmax.reference import segment_softmax_reference


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def implementations():
    return ("xla", "native") if library.is_available() else ("xla",)


def shares_and_grads(run, scores, offsets, weights):
    shares, pull_back = jax.vjp(lambda scores: run(scores, offsets), scores)
    return shares, pull_back(weights)[0]


def exact(scores, offsets, weights):
    """The same in float64."""
    shares, grads = np.zeros(scores.size), np.zeros(scores.size)
    for begin, end in itertools.pairwise(offsets):
        part = scores[begin:end].astype(np.float64)
        if not np.isfinite(part).any():
            continue
        powers = np.exp(part - part.max())
        shares[begin:end] = share = powers / powers.sum()
        grads[begin:end] = share * (weights[begin:end] - (share * weights[begin:end]).sum())
    return shares, grads


def test_all_implementations_equal_the_reference():
    """All cases behind each other in one buffer: compiling is what takes time."""
    rng = np.random.default_rng(0)
    parts = [draw_segments(name, rng) for name in LENGTHS]
    scores = np.concatenate([scores for scores, _ in parts])
    starts = np.cumsum([0, *(scores.size for scores, _ in parts[:-1])], dtype=np.int32)
    offsets = np.concatenate(
        [offsets + start for (_, offsets), start in zip(parts, starts, strict=True)]
    )
    # What is padding in a case is a segment here, but for the last.
    weights = rng.normal(size=scores.size).astype(np.float32)
    runs = {w: partial(segment_softmax, implementation=w) for w in implementations()}
    runs["reference"] = segment_softmax_reference
    together = jax.jit(
        lambda *case: {which: shares_and_grads(run, *case) for which, run in runs.items()}
    )
    want_shares, want_grads = exact(scores, offsets, weights)
    for which, (shares, grads) in together(scores, offsets, weights).items():
        assert shares.dtype == grads.dtype == jnp.float32
        np.testing.assert_allclose(shares, want_shares, rtol=3e-6, atol=1e-9, err_msg=which)
        np.testing.assert_allclose(grads, want_grads, rtol=1e-5, atol=1e-6, err_msg=which)
        assert not np.asarray(shares)[-PADDING:].any()


@pytest.mark.parametrize("which", implementations())
def test_what_a_segment_may_hold(which):
    inf, nan = np.inf, np.nan
    scores = np.array([1, 2, -inf, -inf, 3e38, -3e38, 7, nan, 5, inf, 0, 0, 4], np.float32)
    offsets = np.array([1, 2, 2, 4, 6, 7, 9, 11, 12], np.int32)
    run = jax.jit(partial(segment_softmax, implementation=which))
    got = run(scores, offsets)
    want = [0, 1, 0, 0, 1, 0, 1, nan, nan, nan, nan, 1, 0]
    np.testing.assert_array_equal(got, np.array(want, np.float32))
    # Offsets that make no sense read and write nothing that is not there.
    wrong = np.array([-5, 2, 1, 99, 3, 2**31 - 1, -(2**31), 4, 20], np.int32)
    assert run(np.zeros(13, np.float32), wrong).shape == (13,)


@pytest.mark.parametrize("which", implementations())
def test_long_segments_keep_their_accuracy(which):
    scores = np.full(100_000, 0.1, np.float32)
    offsets = np.array([0, scores.size], np.int32)
    shares = jax.jit(partial(segment_softmax, implementation=which))(scores, offsets)
    np.testing.assert_allclose(shares, 1 / scores.size, rtol=1e-6)


@pytest.mark.parametrize("which", ["xla", "native"])
def test_program_holds_what_was_asked_for(which):
    if which not in implementations():
        pytest.skip(library.why_not())
    scores, offsets = draw_segments("mixed", np.random.default_rng(0))

    def calls(chosen):
        run = jax.jit(partial(shares_and_grads, partial(segment_softmax, implementation=chosen)))
        text = run.lower(scores, offsets, scores).as_text()
        return sorted(re.findall(r"custom_call @(jaxsparse\w+)", text))

    both = ["jaxsparse_segment_softmax", "jaxsparse_segment_softmax_grad"]
    assert calls(which) == (both if which == "native" else [])
    assert calls(None) == (both if "native" in implementations() else [])


def test_runs_on_several_devices_at_once(devices):
    rng = np.random.default_rng(1)
    parts = [draw_segments("many", rng) for _ in range(4)]
    scores, offsets = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    cut = P("shard")
    run = partial(shares_and_grads, segment_softmax)
    sharded = jax.shard_map(
        run, mesh=js.make_mesh(devices=devices[:4]), in_specs=(cut, cut, cut), out_specs=cut
    )
    weights = rng.normal(size=scores.size).astype(np.float32)
    shares, grads = jax.jit(sharded)(scores, offsets, weights)
    for device, part in enumerate(np.split(weights, 4)):
        want = exact(*parts[device], part)
        here = slice(device * part.size, (device + 1) * part.size)
        np.testing.assert_allclose(shares[here], want[0], rtol=3e-6, atol=1e-9)
        np.testing.assert_allclose(grads[here], want[1], rtol=1e-5, atol=1e-6)


def test_second_derivatives():
    scores = np.random.default_rng(2).normal(size=9).astype(np.float32)
    offsets = np.array([0, 4, 4, 8], np.int32)

    def penalty(run, scores):
        grads = jax.grad(lambda s: (run(s, offsets) ** 3).sum())(scores)
        return (grads**2).sum()

    got, want = jax.jit(
        lambda s: [
            jax.grad(partial(penalty, run))(s)
            for run in (segment_softmax, segment_softmax_reference)
        ]
    )(scores)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_nothing_to_do():
    offsets = jnp.zeros(3, jnp.int32)
    assert segment_softmax(jnp.zeros(0), offsets).shape == (0,)
    assert segment_softmax(jnp.ones(2), offsets[:1]).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("scores", "offsets", "message"),
    [
        (np.zeros((2, 2), np.float32), [0, 2], "scores must be float32 [N], got float32 [2, 2]"),
        (np.zeros(2, np.int32), [0, 2], "scores must be float32 [N], got int32 [2]"),
        (np.zeros(2, np.float32), [], "offsets must be int32 [B + 1], got int32 [0]"),
        (np.zeros(2, np.float32), [[0]], "offsets must be int32 [B + 1], got int32 [1, 1]"),
    ],
)
def test_errors(scores, offsets, message):
    with pytest.raises(ValueError, match=re.escape(f"segment_softmax: {message}")):
        segment_softmax(scores, jnp.array(offsets, jnp.int32))


def test_an_implementation_that_is_not_there_is_refused(monkeypatch):
    scores, offsets = jnp.zeros(2), jnp.array([0, 2])
    with pytest.raises(ValueError, match="segment_softmax: there is no implementation 'triton'"):
        segment_softmax(scores, offsets, implementation="triton")
    monkeypatch.setattr(library, "_loaded", lambda: "no compiler")
    with pytest.raises(RuntimeError, match="implementation 'native' is not there: no compiler"):
        segment_softmax(scores, offsets, implementation="native")
    assert segment_softmax(scores, offsets).tolist() == [0.5, 0.5]
