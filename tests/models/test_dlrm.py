# SPDX-License-Identifier: Apache-2.0
"""DLRM against its formula in numpy float64, and its error messages."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from flax import nnx

import jaxsparse as js
from jaxsparse.models.dlrm import DLRM, MLP
from jaxsparse.ops.native import library

FEATURES = {"user": 4, "item": 4, "tags": 4}


def random_acts(batch: int = 5, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=(batch, dim)).astype(np.float32) for name, dim in FEATURES.items()
    }


def numpy_linear(layer: nnx.Linear, x: np.ndarray) -> np.ndarray:
    return x @ np.asarray(layer.kernel[...], np.float64) + np.asarray(layer.bias[...], np.float64)


def numpy_mlp(mlp: MLP, x: np.ndarray) -> np.ndarray:
    for layer in mlp.layers:
        x = np.maximum(numpy_linear(layer, x), 0)
    return x


def numpy_dlrm(model: DLRM, acts: dict[str, np.ndarray], dense: np.ndarray | None) -> np.ndarray:
    vectors = [acts[name].astype(np.float64) for name in model.feature_names]
    beside = np.zeros((len(vectors[0]), 0)) if dense is None else dense.astype(np.float64)
    if model.bottom is not None:
        beside = numpy_mlp(model.bottom, beside)
        vectors = [beside, *vectors]
    dots = [
        (vectors[i] * vectors[j]).sum(axis=1, keepdims=True)
        for i in range(len(vectors))
        for j in range(i)
    ]
    x = np.concatenate([beside, *dots], axis=1)
    return numpy_linear(model.logit, numpy_mlp(model.top, x))[:, 0]


@pytest.mark.parametrize(
    ("num_dense", "bottom"), [(0, ()), (3, ()), (3, (8, 4)), (1, (4,))], ids=str
)
def test_logits_are_those_of_the_formula(num_dense: int, bottom: tuple[int, ...]) -> None:
    model = DLRM(FEATURES, num_dense=num_dense, bottom=bottom, top=(16, 8), rngs=nnx.Rngs(1))
    acts = random_acts()
    dense = np.random.default_rng(1).normal(size=(5, num_dense)).astype(np.float32)
    got = model(acts, dense if num_dense else None)
    want = numpy_dlrm(model, acts, dense if num_dense else None)
    assert got.shape == (5,) and got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_order_of_the_acts_dict_does_not_matter() -> None:
    model = DLRM(FEATURES)
    acts = random_acts()
    np.testing.assert_array_equal(model(acts), model(dict(reversed(acts.items()))))


def test_dots_and_their_gradient_are_the_operation_of_the_platform() -> None:
    model = DLRM(FEATURES)
    run = jax.jit(jax.grad(lambda acts: model(acts).sum()))
    called = "jaxsparse_dot_interaction" in run.lower(random_acts()).as_text()
    assert called == library.is_available()


def test_equal_seeds_make_equal_models() -> None:
    first, second, third = (DLRM(FEATURES, rngs=nnx.Rngs(seed)) for seed in (3, 3, 4))
    acts = random_acts()
    np.testing.assert_array_equal(first(acts), second(acts))
    assert not np.array_equal(first(acts), third(acts))


def feature(name: str, dim: int = 4, **options: object) -> js.FeatureSpec:
    table = js.TableSpec(name, vocabulary_size=10, embedding_dim=dim)
    return js.FeatureSpec(name, table, **options)  # type: ignore[arg-type]


def test_for_features_takes_the_dims_of_the_tables() -> None:
    model = DLRM.for_features([feature("user"), feature("item")], num_dense=2, bottom=(4,))
    assert model.feature_names == ("user", "item")
    assert model.embedding_dim == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DLRM({}), "DLRM: features is empty, expected at least one"),
        (
            lambda: DLRM({"a": 4, "b": 8, "c": 4}),
            "DLRM: dot products need one embedding dim for all features, "
            "got {4: ['a', 'c'], 8: ['b']}",
        ),
        (
            lambda: DLRM(FEATURES, bottom=(8, 4)),
            "DLRM: a bottom MLP (8, 4) needs dense features, num_dense is 0",
        ),
        (
            lambda: DLRM(FEATURES, num_dense=2, bottom=(8,)),
            "DLRM: the bottom MLP must end in the embedding dim 4, got (8,)",
        ),
        (lambda: DLRM({"a": 4}), "DLRM: one feature without dense features has nothing"),
        (
            lambda: DLRM.for_features([feature("seen", combiner=None, max_length=3)]),
            "DLRM: feature 'seen' is unpooled (combiner=None), expected one vector a sample; "
            "pool it with combiner='sum', 'mean' or 'sqrtn'",
        ),
        (
            lambda: DLRM(FEATURES)({"user": np.zeros((2, 4))}),
            "DLRM: acts must have the features ['item', 'tags', 'user'], got ['user']",
        ),
        (
            lambda: DLRM(FEATURES)({**random_acts(2), "item": np.zeros((2, 3, 4))}),
            "DLRM: feature 'item' must be [b, 4], got [2, 3, 4]; pool it first",
        ),
        (
            lambda: DLRM(FEATURES)({**random_acts(2), "item": np.zeros((2, 5))}),
            "DLRM: feature 'item' must be [b, 4], got [2, 5]",
        ),
        (
            lambda: DLRM(FEATURES)(random_acts(2), np.zeros((2, 1))),
            "DLRM: dense must be None, got [2, 1]",
        ),
        (
            lambda: DLRM(FEATURES, num_dense=3)(random_acts(2)),
            "DLRM: dense must be [b, 3], got None",
        ),
        (
            lambda: DLRM(FEATURES, num_dense=3)(random_acts(2), np.zeros((2, 4))),
            "DLRM: dense must be [b, 3], got [2, 4]",
        ),
    ],
)
def test_errors(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()  # type: ignore[operator]
