# SPDX-License-Identifier: Apache-2.0
"""In which order rows come: a pure function of the seed, the epoch and the files' row counts.

Blocks are put in an order, and their rows, one after another, cut into windows of equally many.
Inside a window rows are mixed lane by lane: a lane is a contiguous part of the window that gives
every batch its share. Batches are those of the whole job, and a process takes its part of each::

    window    │ lane 0         │ lane 1         │
              │ 4  1  0  2  3  │ 7  9  5  8  6  │     rows, mixed inside their lanes
    batch 0     4  1             7  9
                └─ process 0     └─ process 1

So the batches do not depend on the number of processes, while with as many lanes as processes, or
a multiple, each process decodes only the blocks that its lanes lie in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


def _generator(*numbers: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(numbers)))


def block_order(run_lengths: Sequence[int], seed: int, epoch: int) -> Int64s:
    """Blocks of an epoch: runs in any order, the blocks of a run in theirs.

    Args:
        run_lengths: number of blocks of each run, over all files.
        seed: >= 0.
        epoch: >= 0.

    Returns:
        ``[blocks]`` numbers of the blocks.

    >>> block_order([1, 2, 1, 1], seed=0, epoch=1).tolist()
    [4, 0, 3, 1, 2]
    """
    lengths = np.asarray(run_lengths, np.int64)
    starts = np.cumsum(lengths) - lengths
    runs = _generator(seed, epoch).permutation(len(lengths))
    inside = np.arange(lengths.sum()) - np.repeat(
        np.cumsum(lengths[runs]) - lengths[runs], lengths[runs]
    )
    order: Int64s = np.repeat(starts[runs], lengths[runs]) + inside
    return order


def window_order(
    num_rows: int, batch_size: int, num_lanes: int, seed: int, epoch: int, window: int
) -> Int64s:
    """Rows of a window in the order in which its batches hold them.

    Args:
        num_rows: rows of the window, the last batch may be short.
        batch_size: of the whole job.
        num_lanes: parts that are mixed by themselves.
        seed: >= 0.
        epoch: >= 0.
        window: its number in the epoch.

    Returns:
        ``[num_rows]``, a permutation.
    """
    full, rest = divmod(num_rows, batch_size)
    edges, rest_edges = (np.arange(num_lanes + 1) * n // num_lanes for n in (batch_size, rest))
    lane_starts = full * edges + rest_edges
    # A seed sequence that ends in 0 is the one without it: that of the blocks.
    generator = _generator(seed, epoch, window + 1)
    order = np.empty(num_rows, np.int64)
    batches = order[: full * batch_size].reshape(full, batch_size)
    for lane in range(num_lanes):
        mixed = lane_starts[lane] + generator.permutation(lane_starts[lane + 1] - lane_starts[lane])
        share = int(edges[lane + 1] - edges[lane])
        batches[:, edges[lane] : edges[lane + 1]] = mixed[: full * share].reshape(full, share)
        last = full * batch_size + rest_edges[lane : lane + 2]
        order[last[0] : last[1]] = mixed[full * share :]
    return order


def process_part(num_rows: int, process_index: int, process_count: int) -> slice:
    """Rows of a batch of ``num_rows`` that a process takes.

    >>> [process_part(10, index, 4) for index in range(4)]
    [slice(0, 2, None), slice(2, 5, None), slice(5, 7, None), slice(7, 10, None)]
    """
    start = num_rows * process_index // process_count
    return slice(start, num_rows * (process_index + 1) // process_count)
