# SPDX-License-Identifier: Apache-2.0
"""What a run remembers beside its `TrainState`, so that it can be taken up where it was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from jaxsparse.ckpt import CheckpointError, CheckpointManager
from jaxsparse.processes import gather
from jaxsparse.train.batches import Dataset
from jaxsparse.train.callbacks import Callback
from jaxsparse.train.feed import knows_position
from jaxsparse.train.report import Window
from jaxsparse.train.state import TrainState

Resume = Literal["auto", "never", "must"]

STATE = "train state"


def step_to_resume(
    manager: CheckpointManager | None, resume: Resume, start: int | None, mesh: Mesh
) -> int | None:
    """Which save a run goes on from; None for a new one.

    Args:
        manager: of the run's saves, if there are any.
        resume: ``auto`` from the latest save if there is one, ``must``, ``never``.
        start: step of the state that was given; None if none was.
        mesh: of the run; a collective of its processes.

    Raises:
        ValueError: ``must`` without a manager, or ``resume`` is none of the three.
        CheckpointError: there is none although there must be, or going on would lose updates, or
            the processes do not see the same saves.
    """
    if resume not in ("auto", "never", "must"):
        raise ValueError(f"fit: resume must be 'auto', 'never' or 'must', got {resume!r}")
    if manager is None:
        if resume == "must":
            raise ValueError("fit: resume='must' needs checkpoint=CheckpointManager(...)")
        return None
    latest = manager.latest()
    seen = gather(mesh, latest)
    if any(other != latest for other in seen):
        raise CheckpointError(
            f"{manager.folder}: the processes see saves up to the steps {seen}; they need one "
            "folder that all of them see"
        )
    if latest is None and resume == "must":
        raise CheckpointError(f"{manager.folder}: no checkpoint to resume from (resume='must')")
    if latest is None or resume == "never":
        manager.check_start(start or 0)
        return None
    if start is not None and start > latest:
        raise CheckpointError(
            f"{manager.folder}: the latest save is at step {latest}, before step {start} of the "
            "state that was given: pass resume='never' to go on from the state, or no state"
        )
    return latest


def restore_dataset(dataset: Dataset, position: Mapping[str, Any]) -> None:
    """Sets a dataset to where a run was saved, if it knows its position.

    Raises:
        CheckpointError: it is not the dataset the run was trained on.
    """
    if position["state"] is None:
        return
    if not knows_position(dataset):
        raise CheckpointError(
            "the run was saved with a dataset that knows its position, and this one has no "
            "restore(state); resume it with the same one"
        )
    try:
        dataset.restore(position["state"])  # type: ignore[attr-defined]
    except ValueError as error:
        raise CheckpointError(
            f"the dataset cannot go on where the run was saved: {error}; resume it with the same "
            "data and batch size"
        ) from error


def my_position(positions: Sequence[Any], mesh: Mesh) -> Any:
    """This process's position among those of all processes that saved.

    Raises:
        CheckpointError: there were more or fewer, and they were not all at one place.
    """
    place, count = _place(mesh)
    if len(positions) == count:
        return positions[place]
    if any(position != positions[0] for position in positions) or positions[0]["state"] is None:
        raise CheckpointError(
            f"the run was saved by {len(positions)} processes with a dataset of its own in each, "
            f"and {count} cannot go on where they were; resume it with {len(positions)}, or train "
            "on a dataset whose batches are those of the whole job"
        )
    return positions[0]


def restore_window(window: Window, windows: Sequence[Any], mesh: Mesh) -> None:
    """Takes over this process's part of the row that was being collected.

    Other processes than those that saved share it anew: the first one gets all of it.
    """
    place, count = _place(mesh)
    window.restore(windows[place if len(windows) == count else 0])
    if len(windows) == count:
        return
    if place == 0:
        for other in windows[1:]:
            part = Window()
            part.restore(other)
            window.merge(part)
    else:
        window.clear()


def _place(mesh: Mesh) -> tuple[int, int]:
    """Which of how many processes of a mesh this is."""
    processes = sorted({device.process_index for device in mesh.devices.flat})
    return processes.index(jax.process_index()), len(processes)


def pack_callbacks(callbacks: Sequence[Callback]) -> tuple[list[Any], dict[str, TrainState]]:
    """States of the callbacks that have one, and the `TrainState` objects they hold by name."""
    packed, others = [], {}
    for index, callback in enumerate(_stateful(callbacks)):
        values: dict[str, Any] = {}
        for key, value in callback.state_to_save().items():
            if isinstance(value, TrainState):
                name = f"{type(callback).__name__}{index}.{key}"
                others[name], value = value, {STATE: name}
            values[key] = value
        packed.append([type(callback).__name__, values])
    return packed, others


def restore_callbacks(
    callbacks: Sequence[Callback], packed: Sequence[Any], others: Mapping[str, TrainState]
) -> None:
    """The inverse of `pack_callbacks`.

    Raises:
        CheckpointError: the run was saved with other callbacks.
    """
    stateful = _stateful(callbacks)
    here, saved = [type(c).__name__ for c in stateful], [name for name, _ in packed]
    if here != saved:
        raise CheckpointError(
            f"the run was saved with the callbacks {saved} and is resumed with {here}; "
            "pass the same ones in the same order"
        )
    for callback, (_, values) in zip(stateful, packed, strict=True):
        callback.restore(
            {
                key: others[value[STATE]]
                if isinstance(value, dict) and set(value) == {STATE}
                else value
                for key, value in values.items()
            }
        )


def _stateful(callbacks: Sequence[Callback]) -> list[Any]:
    return [c for c in callbacks if hasattr(c, "state_to_save") and hasattr(c, "restore")]
