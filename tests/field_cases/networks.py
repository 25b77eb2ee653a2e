# SPDX-License-Identifier: Apache-2.0
"""A dense model small enough to differentiate by hand, and that by hand in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Tanh(nnx.Module):
    """``logit = tanh([acts, dense] @ hidden) @ out + bias``."""

    def __init__(self, inputs, hidden=3, seed=0):
        rng = np.random.default_rng(seed)
        self.hidden = nnx.Param(rng.normal(size=(inputs, hidden)).astype(np.float32))
        self.out = nnx.Param(rng.normal(size=hidden).astype(np.float32))
        self.bias = nnx.Param(np.float32([0.125]))

    def __call__(self, acts, dense, train):
        x = jnp.concatenate([*acts.values(), dense], axis=1)
        return jnp.tanh(x @ self.hidden[...]) @ self.out[...] + self.bias[...]


def tanh_oracle(model, x, labels, weights):
    """Loss, its parts by hand, and gradients of `Tanh` under weighted cross-entropy.

    Args:
        model: the `Tanh`, for its parameters.
        x: ``[B, inputs]``.
        labels: ``[B]`` of 0 and 1.
        weights: ``[B]``.

    Returns:
        Weighted mean loss, logits ``[B]``, gradients by parameter, gradient of ``x``.
    """
    hidden, out, bias = (
        np.asarray(param[...], np.float64) for param in (model.hidden, model.out, model.bias)
    )
    x, labels, weights = (np.asarray(a, np.float64) for a in (x, labels, weights))
    h = np.tanh(x @ hidden)
    logits = h @ out + bias
    losses = np.logaddexp(0, np.where(labels == 1, -logits, logits))
    share = weights / weights.sum()
    slope = share * (1 / (1 + np.exp(-logits)) - labels)
    inner = slope[:, None] * out * (1 - h**2)
    grads = {"hidden": x.T @ inner, "out": h.T @ slope, "bias": slope.sum(keepdims=True)}
    return (share * losses).sum(), logits, grads, inner @ hidden.T


def _keep(grads, state, params=None):
    del state, params
    return jax.tree.map(jnp.zeros_like, grads), grads


KEEP_GRADS = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params), _keep
)
"""Moves nothing; its state is the gradient it was given last."""


def assert_close(got, want):
    """Within 1e-6 of the largest element: a sum over a batch may cancel in one of them."""
    scale = max(float(np.abs(want).max(initial=0)), 1e-30)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-6, atol=1e-6 * scale)
