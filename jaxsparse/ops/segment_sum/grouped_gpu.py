# SPDX-License-Identifier: Apache-2.0
"""Sums of items by segment on a GPU, in an order that depends on the offsets alone.

Items of a segment follow one another. A program sums a tile of short segments, all at once, item
after item. That would make a hot segment one program's serial loop, so long ones are summed as a
tree instead: `FAN_IN` items whose positions start at a multiple of it are a *block*, and as many
blocks are a block of the next level. Other programs sum every block that lies in one long segment.
What is left of a long segment, items at both ends and blocks between, is then summed by the
program of its tile::

    positions   0    32    64    96    128   ...
    segments    [short][            long           ][short]
    blocks            |  b1 |  b2 |  b3 |
    summed as    items ^     b1 + b2 + b3      items
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsparse.ops.triton import Ref, Tile, launch, load_at

FAN_IN = 32
"""Items of a block, and blocks of a block of the second level."""

LONG = 2 * FAN_IN
"""Items from which on a segment is long; such a segment holds at least one block."""

Items = Callable[[Any, jax.Array, jax.Array], jax.Array]
"""From references, positions ``[n]`` and a mask ``[n]`` to items ``[n, columns]`` float32, zeros
where the mask is False."""


@dataclasses.dataclass(frozen=True)
class GroupedSum:
    """A sum by segment: where items come from, and what happens to the sums."""

    name: str
    tile: Tile
    num_items: int
    num_segments: int
    items: Items
    finish: Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]
    """From references, segments ``[n]``, a mask ``[n]`` and their sums to the results."""

    def __call__(self, refs: Any, offsets: jax.Array, *, interpret: bool) -> jax.Array:
        """Sums ``[num_segments, dim]`` float32 of what ``refs``, a pytree of arrays, holds.

        Args:
            refs: passed on to ``items`` and ``finish`` as references.
            offsets: ``[num_segments + 1]`` int32, ascending; positions outside the items hold
                nothing.
            interpret: True runs without a GPU.
        """
        shape = jax.ShapeDtypeStruct((self.num_segments, self.tile.dim), jnp.float32)
        if self.num_segments == 0 or self.num_items == 0:
            return jnp.zeros(shape.shape, shape.dtype)
        levels: tuple[jax.Array, ...] = ()
        num_blocks = self.num_items // FAN_IN
        while len(levels) < 2 and num_blocks > 0:
            levels = (*levels, self._sum_blocks(refs, offsets, levels, num_blocks, interpret))
            num_blocks //= FAN_IN
        result: jax.Array = launch(
            self._segments_kernel,
            refs,
            offsets,
            levels,
            name=self.name,
            out_shape=shape,
            num_programs=-(-self.num_segments // self.tile.rows),
            interpret=interpret,
        )
        return result

    # ---- blocks of long segments ----------------------------------------------------------------

    def _sum_blocks(
        self,
        refs: Any,
        offsets: jax.Array,
        levels: tuple[jax.Array, ...],
        num_blocks: int,
        interpret: bool,
    ) -> jax.Array:
        """Sums ``[num_blocks, dim]`` of the next level; only blocks in long segments are set."""
        sums: jax.Array = launch(
            self._blocks_kernel,
            refs,
            offsets,
            levels,
            name=f"{self.name}_blocks_{len(levels) + 1}",
            out_shape=jax.ShapeDtypeStruct((num_blocks, self.tile.dim), jnp.float32),
            num_programs=-(-num_blocks // self.tile.rows),
            interpret=interpret,
        )
        return sums

    def _blocks_kernel(self, refs: Any, offsets: Ref, levels: tuple[Ref, ...], sums: Ref) -> None:
        blocks = self.tile.row_numbers()
        size = FAN_IN ** (len(levels) + 1)
        inside = blocks < sums.shape[0]
        inside = inside & self._is_in_long(offsets, blocks * size, size, inside)
        item = self._level(refs, levels, len(levels))

        def add(index: jax.Array, total: jax.Array) -> jax.Array:
            return total + item(blocks * FAN_IN + index, inside)

        rounds = jnp.max(inside.astype(jnp.int32)) * FAN_IN
        total = lax.fori_loop(0, rounds, add, self.tile.zeros())
        self.tile.store(sums, blocks, inside, total)

    def _is_in_long(self, offsets: Ref, first: jax.Array, size: int, mask: jax.Array) -> jax.Array:
        """Whether ``size`` positions from each of ``first [n]`` on lie in one long segment."""
        low = jnp.zeros_like(first)
        high = jnp.full_like(first, self.num_segments)

        # The last segment that starts at or before ``first``: between low and high, exclusive.
        for _ in range(self.num_segments.bit_length()):
            middle = lax.div(low + high, jnp.int32(2))
            is_before = load_at(offsets, middle, mask) <= first
            low, high = jnp.where(is_before, middle, low), jnp.where(is_before, high, middle)
        start, stop = self._bounds(offsets, low, mask)
        return (stop - start >= LONG) & (start <= first) & (first + size <= stop)

    # ---- segments -------------------------------------------------------------------------------

    def _segments_kernel(self, refs: Any, offsets: Ref, levels: tuple[Ref, ...], out: Ref) -> None:
        segments = self.tile.row_numbers()
        inside = segments < self.num_segments
        start, stop = self._bounds(offsets, segments, inside)
        is_long = stop - start >= LONG
        is_short = inside & ~is_long
        length = jnp.where(is_short, stop - start, 0)

        def add(index: jax.Array, total: jax.Array) -> jax.Array:
            # Two at a time: their loads overlap, and half as many additions follow each other.
            at = index * 2
            first = self.items(refs, start + at, at < length)
            return total + (first + self.items(refs, start + at + 1, at + 1 < length))

        rounds = lax.div(jnp.max(length) + 1, jnp.int32(2))
        total = lax.fori_loop(0, rounds, add, self.tile.zeros())
        self.tile.store(out, segments, is_short, self.finish(refs, segments, is_short, total))
        if levels:
            # A loop of no rounds where no segment is long.
            num_rows = jnp.max(is_long.astype(jnp.int32)) * self.tile.rows
            lax.fori_loop(0, num_rows, self._long_row(refs, offsets, levels, out, segments), None)

    def _long_row(
        self,
        refs: Any,
        offsets: Ref,
        levels: tuple[Ref, ...],
        out: Ref,
        segments: jax.Array,
    ) -> Callable[[jax.Array, None], None]:
        """Sums one of the tile's segments if it is long: all rows of the tile add its parts."""

        def run(row: jax.Array, _: None) -> None:
            # The same segment in every lane.
            segment = jnp.zeros_like(segments) + (jnp.min(segments) + row)
            start, stop = self._bounds(offsets, segment, segment < self.num_segments)
            first, last = jnp.max(start), jnp.max(stop)
            is_long = last - first >= LONG
            sums = self.tile.zeros()
            for level, begin, end in pieces(first, jnp.where(is_long, last, first), len(levels)):
                sums = self._add_range(sums, self._level(refs, levels, level), begin, end)
            total = jnp.broadcast_to(jnp.sum(sums, axis=0)[None, :], sums.shape)
            lane = jnp.arange(self.tile.rows, dtype=jnp.int32)
            mask = is_long & (lane == 0)
            self.tile.store(out, segment, mask, self.finish(refs, segment, mask, total))

        return run

    def _add_range(
        self,
        sums: jax.Array,
        item: Callable[[jax.Array, jax.Array], jax.Array],
        begin: jax.Array,
        end: jax.Array,
    ) -> jax.Array:
        """Adds items ``begin .. end`` to the rows of a tile, in turn."""
        lanes = jnp.arange(self.tile.rows, dtype=jnp.int32)

        def add(index: jax.Array, sums: jax.Array) -> jax.Array:
            at = begin + index * self.tile.rows + lanes
            return sums + item(at, at < end)

        rounds = lax.div(end - begin + (self.tile.rows - 1), jnp.int32(self.tile.rows))
        added: jax.Array = lax.fori_loop(0, rounds, add, sums)
        return added

    # ---- both -----------------------------------------------------------------------------------

    def _bounds(
        self, offsets: Ref, segments: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Positions of segments ``[n]``: never outside the items, whatever the offsets say."""
        start = load_at(offsets, segments, mask)
        stop = load_at(offsets, segments + 1, mask)
        start = jnp.clip(start, 0, self.num_items)
        return start, jnp.clip(stop, start, self.num_items)

    def _level(
        self, refs: Any, levels: tuple[Ref, ...], level: int
    ) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Items of a level: 0 for those of the caller, else sums of blocks."""
        if level == 0:
            return lambda at, mask: self.items(refs, at, mask)
        return lambda at, mask: self.tile.load(levels[level - 1], at, mask)


def pieces(
    first: jax.Array, last: jax.Array, num_levels: int
) -> list[tuple[int, jax.Array, jax.Array]]:
    """Cuts items ``first .. last`` into ``(level, begin, end)``, larger blocks in the middle."""
    pieces, tails = [], []
    for level in range(num_levels):
        # Up to the next whole block of the level above; all of it where there is none.
        begin = jnp.minimum(lax.div(first + (FAN_IN - 1), jnp.int32(FAN_IN)) * FAN_IN, last)
        end = jnp.maximum(lax.div(last, jnp.int32(FAN_IN)) * FAN_IN, begin)
        pieces.append((level, first, begin))
        tails.append((level, end, last))
        has_block = end > begin
        first = jnp.where(has_block, lax.div(begin, jnp.int32(FAN_IN)), 0)
        last = jnp.where(has_block, lax.div(end, jnp.int32(FAN_IN)), 0)
    return [*pieces, (num_levels, first, last), *reversed(tails)]
