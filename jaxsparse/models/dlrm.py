# SPDX-License-Identifier: Apache-2.0
"""DLRM: embeddings and dense features meet in pairwise dot products."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsparse.ops.dot_interaction import dot_interaction
from jaxsparse.specs import FeatureSpec


class MLP(nnx.Module):
    """Linear layers, each followed by a ReLU."""

    def __init__(self, num_inputs: int, widths: Sequence[int], *, rngs: nnx.Rngs) -> None:
        sizes = (num_inputs, *widths)
        self.layers = nnx.List(
            nnx.Linear(n, m, kernel_init=nnx.initializers.he_normal(), rngs=rngs)
            for n, m in itertools.pairwise(sizes)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[b, num_inputs]`` to ``[b, widths[-1]]``."""
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return x


class DLRM(nnx.Module):
    """Deep learning recommendation model, in float32.

    The dense features go through the bottom MLP to one more vector of the embeddings' width; the
    dot products of all pairs of vectors, beside the bottom's output, go through the top MLP to one
    logit. Without a bottom MLP the dense features, if any, go to the top as they are.

    Source: Naumov et al. 2019, arXiv 1906.00091.

    >>> model = DLRM({"user": 4, "item": 4}, num_dense=3, bottom=(8, 4), top=(16,))
    >>> acts = {"user": jnp.ones((2, 4)), "item": jnp.ones((2, 4))}
    >>> model(acts, jnp.ones((2, 3))).shape
    (2,)
    """

    def __init__(
        self,
        features: Mapping[str, int],
        *,
        num_dense: int = 0,
        bottom: Sequence[int] = (),
        top: Sequence[int] = (64, 32),
        rngs: nnx.Rngs | None = None,
    ) -> None:
        """Makes the layers.

        Args:
            features: embedding dim by feature, all equal.
            num_dense: number d of dense features.
            bottom: widths of the bottom MLP, the last one the embedding dim; empty for none.
            top: widths of the hidden layers of the top MLP; the layer of one logit is added.
            rngs: default ``nnx.Rngs(0)``.

        Raises:
            ValueError: the dims differ, or the bottom MLP does not fit.
        """
        rngs = nnx.Rngs(0) if rngs is None else rngs
        dim = _common_dim(features)
        _check_bottom(tuple(bottom), num_dense, dim)
        self.feature_names = tuple(features)
        self.embedding_dim = dim
        self.num_dense = num_dense
        self.bottom = MLP(num_dense, bottom, rngs=rngs) if bottom else None
        num_vectors = len(features) + bool(bottom)
        num_pairs = num_vectors * (num_vectors - 1) // 2
        widths = (num_pairs + (dim if bottom else num_dense), *top)
        if widths[0] == 0:
            raise ValueError(
                "DLRM: one feature without dense features has nothing to interact with; "
                "add a feature, or dense features"
            )
        self.top = MLP(widths[0], top, rngs=rngs)
        self.logit = nnx.Linear(widths[-1], 1, rngs=rngs)

    @classmethod
    def for_features(
        cls,
        features: Sequence[FeatureSpec],
        *,
        num_dense: int = 0,
        bottom: Sequence[int] = (),
        top: Sequence[int] = (64, 32),
        rngs: nnx.Rngs | None = None,
    ) -> DLRM:
        """A model of the features of an `EmbeddingCollection`; arguments as `DLRM`.

        Raises:
            ValueError: as `DLRM`, or a feature is unpooled.
        """
        for feature in features:
            if feature.combiner is None:
                raise ValueError(
                    f"DLRM: feature {feature.name!r} is unpooled (combiner=None), expected one "
                    "vector a sample; pool it with combiner='sum', 'mean' or 'sqrtn'"
                )
        dims = {feature.name: feature.table.embedding_dim for feature in features}
        return cls(dims, num_dense=num_dense, bottom=bottom, top=top, rngs=rngs)

    def __call__(
        self, acts: Mapping[str, jax.Array], dense: jax.Array | None = None, train: bool = False
    ) -> jax.Array:
        """Logits of a batch.

        Args:
            acts: ``[b, D]`` float32 by feature, as `EmbeddingCollection.lookup` returns.
            dense: ``[b, d]`` float32, None where ``num_dense`` is 0.
            train: has no effect: nothing here acts differently in training.

        Returns:
            ``[b]`` float32.

        Raises:
            ValueError: features, shapes or dense features are not those the model was made for.
        """
        del train
        vectors = self._vectors(acts)
        self._check_dense(dense)
        beside = dense
        if self.bottom is not None and dense is not None:
            beside = self.bottom(dense)
            vectors = [beside, *vectors]
        dots = dot_interaction(vectors)
        x = dots if beside is None else jnp.concatenate([beside, dots], axis=1)
        logits: jax.Array = self.logit(self.top(x))
        return logits[:, 0]

    def _vectors(self, acts: Mapping[str, jax.Array]) -> list[jax.Array]:
        if set(acts) != set(self.feature_names):
            raise ValueError(
                f"DLRM: acts must have the features {sorted(self.feature_names)}, "
                f"got {sorted(acts)}"
            )
        for name, vectors in acts.items():
            if vectors.ndim != 2 or vectors.shape[1] != self.embedding_dim:
                raise ValueError(
                    f"DLRM: feature {name!r} must be [b, {self.embedding_dim}], got "
                    f"{list(vectors.shape)}" + "; pool it first" * (vectors.ndim == 3)
                )
        return [acts[name] for name in self.feature_names]

    def _check_dense(self, dense: jax.Array | None) -> None:
        got = None if dense is None else list(dense.shape)
        columns = None if dense is None or dense.ndim != 2 else dense.shape[1]
        if columns != (self.num_dense or None):
            expected = f"[b, {self.num_dense}]" if self.num_dense else "None"
            raise ValueError(f"DLRM: dense must be {expected}, got {got}")


def _common_dim(features: Mapping[str, int]) -> int:
    if not features:
        raise ValueError("DLRM: features is empty, expected at least one")
    by_dim: dict[int, list[str]] = {}
    for name, dim in features.items():
        by_dim.setdefault(dim, []).append(name)
    if len(by_dim) > 1:
        raise ValueError(
            f"DLRM: dot products need one embedding dim for all features, got {by_dim}"
        )
    return next(iter(by_dim))


def _check_bottom(bottom: tuple[int, ...], num_dense: int, dim: int) -> None:
    if bottom and not num_dense:
        raise ValueError(f"DLRM: a bottom MLP {bottom} needs dense features, num_dense is 0")
    if bottom and bottom[-1] != dim:
        raise ValueError(f"DLRM: the bottom MLP must end in the embedding dim {dim}, got {bottom}")
