# SPDX-License-Identifier: Apache-2.0
"""Rows by their place in an epoch, out of blocks that are decoded and dropped early, or held."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from types import TracebackType

import numpy as np

from jaxsparse.data.batch import Batch
from jaxsparse.data.blocks import Block, FileIndex, Format, Reader
from jaxsparse.data.joining import join_batches
from jaxsparse.data.order import Int64s
from jaxsparse.data.sources import Source

OPEN_FILES = 16
"""Files kept open at a time; a shuffled epoch jumps between all of them."""


class IndexedFile:
    """A file whose blocks are known."""

    def __init__(self, source: Source, form: Format) -> None:
        """Finds its blocks."""
        self.source = source
        self.form = form
        self.index: FileIndex = form.index(source)

    def open(self) -> Reader:
        """Opens it."""
        return self.form.open(self.source, self.index)


class RowReader:
    """Reads rows numbered over blocks in a given order; a context manager."""

    def __init__(self, files: Sequence[IndexedFile], blocks: Sequence[tuple[int, Block]]) -> None:
        """Opens nothing yet.

        Args:
            files: where the blocks lie.
            blocks: number of the file, and block, in the order in which rows are numbered.
        """
        self._files = files
        self._blocks = blocks
        counts = np.fromiter((block.num_rows for _, block in blocks), np.int64, len(blocks))
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self._open: OrderedDict[int, Reader] = OrderedDict()
        # Windows end inside of blocks: the next one goes on with the last block of this one.
        self._last: tuple[int, Batch | None] = (-1, None)

    def take(self, rows: Int64s) -> Batch:
        """The rows of ``rows`` ``[n]``, ascending and distinct; decodes the blocks they lie in."""
        edges = np.searchsorted(rows, self._starts)
        parts, origins = [], []
        for number in np.flatnonzero(np.diff(edges)).tolist():
            inside = rows[edges[number] : edges[number + 1]] - self._starts[number]
            file, where = self._blocks[number]
            origins.append(f"{self._files[file].source.path} from {where.first_row} on")
            block = self._block(number)
            if inside[-1] - inside[0] + 1 == len(inside):
                parts.append(block.slice(int(inside[0]), int(inside[-1]) + 1))
            else:
                parts.append(block.take(inside))
        return join_batches(parts, origins)

    def _block(self, number: int) -> Batch:
        if self._last[0] != number or self._last[1] is None:
            self._last = (-1, None)  # before the next is decoded
            file, block = self._blocks[number]
            self._last = (number, self._reader(file).read(block))
        batch = self._last[1]
        assert batch is not None
        return batch

    def _reader(self, file: int) -> Reader:
        reader = self._open.pop(file, None) or self._files[file].open()
        self._open[file] = reader
        if len(self._open) > OPEN_FILES:
            _, oldest = self._open.popitem(last=False)
            oldest.close()
        return reader

    def __enter__(self) -> RowReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for reader in self._open.values():
            reader.close()
        self._open.clear()
        self._last = (-1, None)


class HeldRows:
    """The same rows where all of them are in memory."""

    def __init__(self, held: Batch, row_counts: Sequence[int], order: Sequence[int]) -> None:
        """Numbers the rows anew.

        Args:
            held: the rows of all blocks, one block after another.
            row_counts: rows of each block.
            order: blocks in the order in which rows are numbered.
        """
        stops = np.cumsum(np.asarray(row_counts, np.int64))
        self._held = held
        self._places = np.concatenate(
            [np.arange(stops[block] - row_counts[block], stops[block]) for block in order]
        )

    def take(self, rows: Int64s) -> Batch:
        """The rows of ``rows`` ``[n]``."""
        return self._held.take(self._places[rows])
