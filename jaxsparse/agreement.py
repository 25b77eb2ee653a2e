# SPDX-License-Identifier: Apache-2.0
"""Sizes of a batch that several processes agree on: each votes, the largest counts.

The vote is one small int32 vector, so that a single maximum over processes settles a batch:
samples per device and what each slab needs. Lower bounds are voted negated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

import jax
from jax.sharding import Mesh

from jaxsparse.ladder import SlabNeed
from jaxsparse.prepared import PreparedIds
from jaxsparse.processes import NOTHING, Int32s, is_shared, maximum


def num_votes(num_slabs: int) -> int:
    """Length of `vote`."""
    return 4 + 2 * num_slabs


def vote(ids: PreparedIds) -> list[int]:
    """What a process says of its batch; one without samples leaves their number to others."""
    samples = (ids.samples, -ids.samples) if ids.num_samples else (0, NOTHING)
    form = fingerprint(_form(ids))
    needs = [size for need in ids.needs() for size in (need.ragged_ids, need.rows)]
    return [*samples, form, -form, *needs]


def abstain(num_slabs: int) -> list[int]:
    """The vote of a process that has no batch at all."""
    return [0, *[NOTHING] * (num_votes(num_slabs) - 1)]


def settle(
    mesh: Mesh, ids: PreparedIds, votes: Int32s | Sequence[int]
) -> tuple[PreparedIds, tuple[SlabNeed, ...]]:
    """The batch laid out as all agreed; a collective only where sample counts differ.

    Args:
        mesh: the mesh.
        ids: this process's batch.
        votes: the maximum over processes of `vote`.

    Returns:
        The batch with the largest number of samples per device, and the largest needs.

    Raises:
        ValueError: batches differ in form; raised by every process.
    """
    most, fewest = int(votes[0]), -int(votes[1])
    if int(votes[2]) != -int(votes[3]):
        raise ValueError(
            "the batches of the processes must have one form: the same features as fixed numbers "
            f"of ids per sample or as bags, with or without weights; process "
            f"{jax.process_index()} has {_form(ids)}"
        )
    ids = ids.with_samples(most)
    if int(votes[1]) != NOTHING and most != fewest:
        # The needs were counted for other samples per device: count again, all together.
        votes = maximum(mesh, vote(ids))
    sizes = [int(size) for size in votes[4:]]
    needs = tuple(
        SlabNeed(own.fixed_ids, ragged, rows)
        for own, ragged, rows in zip(ids.needs(), sizes[::2], sizes[1::2], strict=True)
    )
    return ids, needs


def agree(
    mesh: Mesh, num_slabs: int, prepare: Callable[[], PreparedIds]
) -> tuple[PreparedIds, tuple[SlabNeed, ...]]:
    """Prepares, votes and settles; on a mesh of one process the batch as it is, and its needs.

    Raises:
        Exception: ``prepare``'s own; where it failed in another process a RuntimeError.
        ValueError: batches differ in form.
    """
    if not is_shared(mesh):
        ids = prepare()
        return ids, ids.needs()
    try:
        ids = prepare()
    except (ValueError, TypeError):
        maximum(mesh, [1 + jax.process_index(), *abstain(num_slabs)])
        raise
    votes = maximum(mesh, [0, *vote(ids)])
    if votes[0]:
        raise failed_elsewhere(votes[0] - 1)
    return settle(mesh, ids, votes[1:])


def failed_elsewhere(process: int) -> RuntimeError:
    """What the other processes raise when one could not prepare its batch."""
    return RuntimeError(
        f"process {process} could not go on, for a reason that it tells itself; this batch has "
        "changed nothing anywhere"
    )


def raise_together(mesh: Mesh, error: BaseException | None) -> None:
    """Raises where any process has an error; a collective, nothing on a mesh of one process.

    Raises:
        Exception: ``error``, or where another process has one a RuntimeError.
    """
    if not is_shared(mesh):
        if error is not None:
            raise error
        return
    failed = maximum(mesh, [0 if error is None else 1 + jax.process_index()])[0]
    if failed:
        raise error or failed_elsewhere(failed - 1)


def fingerprint(form: object) -> int:
    """31 bits of a form's text, never 0: forms that differ are told apart, not proven equal."""
    return (crc32(repr(form).encode()) >> 1) or 1


def _form(ids: PreparedIds) -> list[tuple[int, dict[str, int], dict[str, str]]]:
    """By slab: rows per shard, ids per sample of fixed features, what kind of bags others are."""
    return [
        (
            part.slab.rows_per_shard,
            {name: fixed.codes.shape[1] for name, fixed in part.fixed.items()},
            {
                name: "bags" if ragged.weights is None else "weighted bags"
                for name, ragged in part.ragged.items()
            },
        )
        for part in ids.features
    ]
