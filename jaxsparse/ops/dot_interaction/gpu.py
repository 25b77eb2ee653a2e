# SPDX-License-Identifier: Apache-2.0
"""Pairwise dots of a sample's vectors on a GPU: a program holds one sample's vectors at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxsparse.ops.triton import Ref, launch, masked_load, masked_store

MAX_BLOCK = 32
"""Most vectors whose dots a program holds: those of twice as many do not fit its registers."""

MAX_COLUMNS = 64
"""Columns multiplied at a time."""

_LEAST = 16
"""Least size of a matrix multiplication in Triton."""


def dot_interaction_triton(vectors: tuple[jax.Array, ...], *, interpret: bool = False) -> jax.Array:
    """Dots of all pairs; see `jaxsparse.ops.dot_interaction.dot_interaction`.

    Args:
        vectors: F arrays ``[b, D]`` float32.
        interpret: True runs without a GPU.

    Returns:
        ``[b, F * (F - 1) / 2]`` float32: those of 1 and 0, of 2 and 0, of 2 and 1, ...
    """
    tiles = _Tiles(vectors)
    shape = jax.ShapeDtypeStruct((tiles.num_samples, tiles.num_pairs), jnp.float32)
    if 0 in shape.shape:
        return jnp.zeros(shape.shape, shape.dtype)
    result: jax.Array = launch(
        tiles.dots,
        jnp.concatenate(vectors),
        name="dot_interaction",
        out_shape=shape,
        num_programs=tiles.num_samples * tiles.num_blocks**2,
        interpret=interpret,
    )
    return result


def dot_interaction_grads_triton(
    grads: jax.Array, vectors: tuple[jax.Array, ...], *, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Gradients of the vectors.

    Args:
        grads: ``[b, F * (F - 1) / 2]`` float32, of the result.
        vectors: F arrays ``[b, D]`` float32.
        interpret: True runs without a GPU.

    Returns:
        F arrays ``[b, D]`` float32, slices of one.
    """
    tiles = _Tiles(vectors)
    if 0 in grads.shape:
        return tuple(map(jnp.zeros_like, vectors))
    # XLA makes no copy here where the vectors are slices of one array, in order.
    joined = jnp.concatenate(vectors)
    result: jax.Array = launch(
        tiles.grads,
        joined,
        grads,
        name="dot_interaction_grads",
        out_shape=jax.ShapeDtypeStruct(joined.shape, jnp.float32),
        num_programs=tiles.num_samples * tiles.num_blocks,
        interpret=interpret,
    )
    return tuple(jnp.split(result, len(vectors)))


class _Tiles:
    """Sizes of a call, and its kernels on vectors ``[F * b, D]``.

    Of a sample's dots, a square, a program computes a block of at most `MAX_BLOCK` vectors by as
    many; of its gradients those of one block of vectors.
    """

    def __init__(self, vectors: tuple[jax.Array, ...]):
        self.num_vectors = len(vectors)
        self.num_samples, self.dim = vectors[0].shape
        self.num_pairs = self.num_vectors * (self.num_vectors - 1) // 2
        self.size = min(max(pl.next_power_of_2(self.num_vectors), _LEAST), MAX_BLOCK)
        self.num_blocks = -(-self.num_vectors // self.size)
        self.columns = min(max(pl.next_power_of_2(self.dim), _LEAST), MAX_COLUMNS)
        self.num_chunks = -(-self.dim // self.columns)

    def dots(self, vectors: Ref, out: Ref) -> None:
        """Dots of one sample, of one block of vectors with another."""
        program, blocks = pl.program_id(0), jnp.int32(self.num_blocks)
        sample = lax.div(program, blocks * blocks)
        first, second = lax.rem(lax.div(program, blocks), blocks), lax.rem(program, blocks)

        def add(chunk: jax.Array, sums: jax.Array) -> jax.Array:
            lhs = self._load(vectors, sample, first, chunk)
            rhs = lhs if self.num_blocks == 1 else self._load(vectors, sample, second, chunk)
            return sums + _matmul(lhs, rhs, rhs_axis=1)

        # Blocks above the diagonal hold no pair.
        rounds = (second <= first).astype(jnp.int32) * self.num_chunks
        sums = lax.fori_loop(0, rounds, add, jnp.zeros((self.size, self.size), jnp.float32))
        row, column = self._square(first, second)
        is_pair = (column < row) & (row < self.num_vectors)
        at = jnp.where(is_pair, _pair(row, column), self.num_pairs)
        masked_store(out.at[jnp.full_like(at, sample), at], is_pair, sums)

    def grads(self, vectors: Ref, grads: Ref, out: Ref) -> None:
        """Gradients of one sample's vectors, of one block of them."""
        program, blocks = pl.program_id(0), jnp.int32(self.num_blocks)
        sample, first = lax.div(program, blocks), lax.rem(program, blocks)

        def write(chunk: jax.Array, _: None) -> None:
            def add(second: jax.Array, sums: jax.Array) -> jax.Array:
                part = self._load(vectors, sample, second, chunk)
                return sums + _matmul(symmetric(second), part, rhs_axis=0)

            zeros = jnp.zeros((self.size, self.columns), jnp.float32)
            where, inside = self._access(out, sample, first, chunk)
            masked_store(where, inside, lax.fori_loop(0, self.num_blocks, add, zeros))

        def symmetric(second: jax.Array) -> jax.Array:
            row, column = self._square(first, second)
            high, low = jnp.maximum(row, column), jnp.minimum(row, column)
            is_pair = (row != column) & (high < self.num_vectors)
            at = jnp.where(is_pair, _pair(high, low), self.num_pairs)
            return masked_load(grads.at[jnp.full_like(at, sample), at], is_pair)

        lax.fori_loop(0, self.num_chunks, write, None)

    def _load(
        self, vectors: Ref, sample: jax.Array, block: jax.Array, chunk: jax.Array
    ) -> jax.Array:
        return masked_load(*self._access(vectors, sample, block, chunk))

    def _access(
        self, vectors: Ref, sample: jax.Array, block: jax.Array, chunk: jax.Array
    ) -> tuple[Ref, jax.Array]:
        """A block of one sample's vectors and a range of their columns."""
        vector = block * self.size + jnp.arange(self.size, dtype=jnp.int32)
        is_one = vector < self.num_vectors
        # Past the last vector lies nothing, also for the interpreter.
        rows = jnp.where(is_one, vector, self.num_vectors) * self.num_samples + sample
        columns = chunk * self.columns + jnp.arange(self.columns, dtype=jnp.int32)
        inside = is_one[:, None] & (columns < self.dim)[None, :]
        return vectors.at[rows[:, None], columns[None, :]], inside

    def _square(self, first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Numbers of the vectors that the entries of a block of dots are of."""
        shape = (self.size, self.size)
        row = first * self.size + lax.broadcasted_iota(jnp.int32, shape, 0)
        return row, second * self.size + lax.broadcasted_iota(jnp.int32, shape, 1)


def _pair(high: jax.Array, low: jax.Array) -> jax.Array:
    """Place of a pair among the results."""
    return lax.div(high * (high - 1), jnp.int32(2)) + low


def _matmul(lhs: jax.Array, rhs: jax.Array, *, rhs_axis: int) -> jax.Array:
    """float32 throughout: the tensor cores' own float32 has 10 bits after the point."""
    product: jax.Array = lax.dot_general(
        lhs,
        rhs,
        (((1,), (rhs_axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return product
