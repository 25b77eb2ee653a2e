# SPDX-License-Identifier: Apache-2.0
"""Batches out of files larger than memory, resumable at every batch.

pyarrow decodes; the order is our own (`jaxsparse.data.order`). Grain was weighed: its pipelines
move single records through Python, and here a row has to cost about a microsecond.

What is held at a time: the rows of one window and one block; rows that fit one window stay.
Files are indexed when the dataset is made: Parquet by its footers, text by counting lines in one
pass (all rows are parsed in it where bad ones are skipped, so that all processes know how many are
left without asking each other).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import xxhash

from jaxsparse.data.bad_rows import BadRows
from jaxsparse.data.batch import Batch
from jaxsparse.data.blocks import Format
from jaxsparse.data.epochs import EpochDataset, State
from jaxsparse.data.order import Int64s, block_order, process_part, window_order
from jaxsparse.data.row_reader import HeldRows, IndexedFile, RowReader
from jaxsparse.data.sources import Source

LANES = 8
"""Default number of lanes: up to so many processes share the decoding."""

SHUFFLE_ROWS = 1 << 16
"""Default length of the window in which rows are mixed."""


class StreamDataset(EpochDataset):
    """Batches of the rows of files; made by `stream_files` and `stream_criteo`.

    A position is (epoch, batch), whatever the number of processes: what two processes saved four
    or one can restore, and the batches of the whole job stay the same. ``iter()`` gives a process
    its part of each. Where a batch's rows do not share out evenly, a copy of its first row with
    weight 0 fills a process up, so that all have equally many; being a copy, it touches no row of
    a table that the batch would not touch.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Source, Format]],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        shuffle_rows: int = SHUFFLE_ROWS,
        num_lanes: int = LANES,
        drop_last: bool = False,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        """Indexes the files; arguments are those of `stream_files`.

        Raises:
            ValueError: an argument is out of range.
            DataError: a file cannot be read.
        """
        _check(batch_size, seed, shuffle_rows, num_lanes, process_index, process_count)
        super().__init__(batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self._window_rows = max(shuffle_rows // batch_size, 1) * batch_size
        self._num_lanes = num_lanes if shuffle else 1
        self._process = (process_index, process_count)
        self._files = _indexed(sources)
        runs = [
            [(number, block) for block in run]
            for number, file in enumerate(self._files)
            for run in file.index.runs
        ]
        self._run_lengths = [len(run) for run in runs]
        self._blocks = [block for run in runs for block in run]
        self._num_rows = sum(block.num_rows for _, block in self._blocks)
        self._held: Batch | None = None  # all rows, where they are no more than a window

    @property
    def num_rows(self) -> int:
        """Rows of all files, without those that are skipped."""
        return self._num_rows

    @property
    def files(self) -> list[str]:
        """Paths of the files."""
        return [file.source.path for file in self._files]

    @property
    def bad_rows(self) -> BadRows:
        """What is skipped: rows by reason, with an example each."""
        total = BadRows()
        for file in self._files:
            total.merge(file.index.bad)
        return total

    def _identity(self) -> State:
        return self._facts

    @functools.cached_property
    def _facts(self) -> State:
        """What the batches depend on; once, as there may be a million blocks. Files may have
        moved, but not changed their lengths.
        """
        names = "\n".join(f"{file.source.name} {file.source.num_bytes}" for file in self._files)
        counts = [block.num_rows for _, block in self._blocks]
        digest = xxhash.xxh3_64(names.encode() + np.asarray(counts, "<i8").tobytes())
        return {
            "files": digest.hexdigest(),
            "num_rows": self.num_rows,
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "shuffle_rows": self._window_rows,
            "num_lanes": self._num_lanes,
            "drop_last": self._drop_last,
        }

    def _batches(self, epoch: int, offset: int) -> Iterator[Batch]:
        batches_per_window = self._window_rows // self._batch_size
        order = range(len(self._blocks))
        if self._shuffle:
            order = block_order(self._run_lengths, self._seed, epoch).tolist()
        with self._rows(order) as rows:
            for window in range(offset // batches_per_window, -(-len(self) // batches_per_window)):
                first = window * batches_per_window
                for number, batch in enumerate(self._window(rows, epoch, window), first):
                    if number < offset:
                        continue
                    self._passed(epoch, number)
                    yield batch

    def _rows(self, order: Sequence[int]) -> AbstractContextManager[RowReader | HeldRows]:
        """The rows, numbered over blocks in an order.

        Those that fit one window are held anyway while it lasts: they are decoded once for all.
        """
        if self._num_rows > self._window_rows or not self._num_rows:
            return RowReader(self._files, [self._blocks[number] for number in order])
        if self._held is None:
            with RowReader(self._files, self._blocks) as rows:
                self._held = rows.take(np.arange(self._num_rows))
        counts = [block.num_rows for _, block in self._blocks]
        return nullcontext(HeldRows(self._held, counts, order))

    def _window(self, rows: RowReader | HeldRows, epoch: int, window: int) -> Iterator[Batch]:
        """This process's part of a window's batches."""
        start = window * self._window_rows
        num_rows = min(self._window_rows, self.num_rows - start)
        if self._shuffle:
            lanes, seed = self._num_lanes, self._seed
            order = window_order(num_rows, self._batch_size, lanes, seed, epoch, window)
        else:
            order = np.arange(num_rows)
        if self._drop_last:
            order = order[: num_rows // self._batch_size * self._batch_size]
        parts = [
            self._part(order[begin : begin + self._batch_size])
            for begin in range(0, len(order), self._batch_size)
        ]
        is_needed = np.zeros(num_rows, bool)
        for part, _ in parts:
            is_needed[part] = True
        held = rows.take(start + np.flatnonzero(is_needed))
        places = np.cumsum(is_needed) - 1
        for part, num_padding in parts:
            batch = held.take(places[part])
            yield _with_padding(batch, num_padding) if num_padding else batch

    def _part(self, order: Int64s) -> tuple[Int64s, int]:
        """Rows of a batch for this process, padding at their end, and how many are padding."""
        index, count = self._process
        own = order[process_part(len(order), index, count)]
        num_padding = -(-len(order) // count) - len(own)
        return np.concatenate([own, np.repeat(order[:1], num_padding)]), num_padding


def _with_padding(batch: Batch, num_padding: int) -> Batch:
    """The batch with weight 0 for its last rows."""
    weights = np.ones(batch.num_samples, np.float32) if batch.weights is None else batch.weights
    weights[-num_padding:] = 0
    return dataclasses.replace(batch, weights=weights)


def _indexed(sources: Sequence[tuple[Source, Format]]) -> list[IndexedFile]:
    """Indexes files side by side: decompression and counting leave Python's lock alone."""
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        return list(pool.map(lambda pair: IndexedFile(*pair), sources))


def _check(
    batch_size: int,
    seed: int,
    shuffle_rows: int,
    num_lanes: int,
    process_index: int,
    process_count: int,
) -> None:
    least = {"batch_size": batch_size, "shuffle_rows": shuffle_rows, "num_lanes": num_lanes}
    for name, value in {**least, "process_count": process_count}.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an int >= 1, got {value!r}")
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index must be in 0..{process_count - 1}, got {process_index}")
    if batch_size % process_count:
        raise ValueError(
            f"batch_size must be a multiple of the {process_count} processes, got {batch_size}"
        )
