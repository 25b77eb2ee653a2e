# SPDX-License-Identifier: Apache-2.0
"""`CheckpointManager`: the numbered saves of a run, which to keep, and which one is the latest."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from jaxsparse.ckpt.checkpoint import still, take_snapshot, write_and_publish
from jaxsparse.ckpt.durable import remove
from jaxsparse.ckpt.errors import CheckpointError, DamagedError
from jaxsparse.ckpt.host_state import HostState, pack_host_state, read_host_state
from jaxsparse.ckpt.loading import load_state
from jaxsparse.ckpt.manifest import MANIFEST, Manifest, check_files, read_manifest
from jaxsparse.ckpt.processes import agree, is_writer
from jaxsparse.ckpt.saves import OTHERS, Snapshots, link, make_room, write_save
from jaxsparse.ckpt.tables import Copies
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.store import RowStore

LATEST = "latest"
"""A link to the newest save, for people and scripts."""


class Restored(NamedTuple):
    """What `CheckpointManager.restore` returns."""

    state: Any
    step: int
    run: Any
    """What `save` was given as ``run``."""
    others: dict[str, Any]
    """The further states."""
    new: tuple[str, ...]
    """Tables and leaves that the save lacked and that kept the template's values."""
    changed: tuple[str, ...]
    """Learning rates whose specs have changed since; they are the template's."""


class CheckpointManager:
    """Saves a run every so many steps into ``folder/000000200`` and so on.

    A save is written under another name and renamed when all of it is on the disk, so a name of
    digits is always a whole save, whatever was killed when. The newest is always kept.

    >>> import tempfile
    >>> CheckpointManager(tempfile.mkdtemp(), every=100).latest() is None
    True
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int = 200,
        keep: int = 3,
        *,
        best: str | None = None,
        mode: Literal["max", "min"] = "max",
        background: bool = False,
        allow_new: bool = False,
    ) -> None:
        """Touches nothing on the disk.

        Args:
            folder: of this run's saves alone; made by the first save.
            every: steps between saves of `Trainer.fit`, which also saves at the end.
            keep: newest saves that are kept.
            best: name of an evaluation's metric: the save with its best value is kept as well,
                and `Trainer.fit` saves after every evaluation.
            mode: whether more or less of ``best`` is better.
            background: copy the state to the host and write it on a thread while training goes
                on. Needs the state's bytes once more in host memory to the end, and one process. An
                error is raised by the next save, by `wait` or `close`. With tables of a `RowStore`
                training stops until all is written, as without.
            allow_new: what a save lacks (new tables, new parameters) keeps its initial values
                when a run is taken up; otherwise that is an error.

        Raises:
            ValueError: a count is below 1, or the mode is neither.
        """
        for name, count in (("every", every), ("keep", keep)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"CheckpointManager: {name} must be an int >= 1, got {count!r}")
        if mode not in ("max", "min"):
            raise ValueError(f"CheckpointManager: mode must be 'max' or 'min', got {mode!r}")
        if background and jax.process_count() > 1:
            raise ValueError("CheckpointManager: background=True needs a single process")
        self.folder = Path(folder).absolute()
        self.every, self.keep, self.best, self.mode = every, keep, best, mode
        self.background, self.allow_new = background, allow_new
        self._thread: threading.Thread | None = None
        self._copies: dict[str, Copies] = {}  # by state, kept from one save to the next
        self._failure: Exception | None = None

    def steps(self) -> list[int]:
        """Steps of all whole saves, ascending."""
        self._join()
        try:
            names = [path.name for path in self.folder.iterdir() if path.name.isdecimal()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be read: {error.strerror}") from error
        return sorted(int(name) for name in names if (self.folder / name / MANIFEST).exists())

    def latest(self) -> int | None:
        """Step of the newest whole save; None if there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def path(self, step: int) -> Path:
        """Folder of a save."""
        return self.folder / f"{step:09d}"

    def manifest(self, step: int) -> Manifest:
        """What a save holds: ``step``, ``metrics``, ``tables``, ``leaves``, ``bytes``.

        Raises:
            CheckpointError: there is no such save.
        """
        self._join()
        return read_manifest(self.path(step))

    def check_start(self, step: int) -> None:
        """Raises if a run at ``step`` would save below what the folder holds.

        Raises:
            CheckpointError: with the ways out.
        """
        latest = self.latest()
        if latest is not None and step < latest:
            raise CheckpointError(
                f"{self.folder}: holds saves up to step {latest}, and this run starts at step "
                f"{step}; go on from there with resume='auto', give the run another folder, or "
                "delete this one"
            )

    def save(
        self,
        emb: EmbeddingCollection,
        state: Any,
        *,
        run: Any = None,
        metrics: Mapping[str, Any] | None = None,
        others: Mapping[str, Any] | None = None,
        store: RowStore | None = None,
    ) -> None:
        """Saves a state under its step, then deletes the saves that are not to be kept.

        All processes call it. With ``background`` it returns when the state has been copied; with
        tables of a row store, whose rows would be the larger part of the copy, when all is written.

        Args:
            emb: the collection of ``state.embeddings``.
            state: has ``step`` and ``embeddings``, such as a `TrainState`.
            run: what the run remembers on the host; see `pack_host_state`.
            metrics: of an evaluation of this very state.
            others: further states of the same kind by name.
            store: the `RowStore` that goes with the state, where tables have Dynamic keys or tiers.

        Raises:
            CheckpointError: the folder holds later saves, or this one.
            SaveError: it cannot be written or is not finite (nothing older is touched), or the
                save before failed in the background.
            ValueError: there are further states, and tables of a row store: it has the rows of one
                state alone.
        """
        self.wait()
        if others and emb.stored_tables:
            raise ValueError(
                f"save: further states {sorted(others)} have no rows of {sorted(emb.stored_tables)}"
                " (Dynamic keys or tiers): the RowStore has those of the state that is trained; "
                "keep the best save by CheckpointManager(best=)"
            )
        background = self.background and not emb.stored_tables
        step = int(state.step)
        self.check_start(step)
        if self.path(step).exists():
            raise CheckpointError(f"{self.path(step)}: exists; a checkpoint is never overwritten")
        host = pack_host_state(run)
        notes = {"step": step, "metrics": _finite_numbers(metrics or {})}
        with still(store):
            snapshots = {
                name: take_snapshot(
                    emb, one, self._copies.setdefault(name, {}) if background else None, store
                )
                for name, one in {"": state, **(others or {})}.items()
            }
            if not background:
                self._write(step, snapshots, host, notes)
                return

        def write() -> None:
            try:
                self._write(step, snapshots, host, notes)
            except Exception as error:
                self._failure = error

        self._thread = threading.Thread(target=write, name="jaxsparse-save")
        self._thread.start()

    @property
    def is_saving(self) -> bool:
        """Whether a save is being written in the background."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Waits for a save in the background.

        Raises:
            SaveError: it failed.
        """
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    close = wait

    def restore(
        self,
        emb: EmbeddingCollection,
        template: Any,
        step: int | None = None,
        store: RowStore | None = None,
    ) -> Restored:
        """Loads a save, on any mesh.

        Args:
            emb: equal tables on any mesh, in any placement.
            template: a state of the same structure; its tables are donated.
            step: of the save; default the latest.
            store: the `RowStore` that goes with the template, where tables have Dynamic keys or
                tiers; what it has of them is replaced.

        Raises:
            CheckpointError: there is none, it is damaged, or it does not fit.
        """
        self.wait()
        step = self.latest() if step is None else step
        if step is None:
            raise CheckpointError(f"{self.folder}: no checkpoint there")
        try:
            return self._restore(emb, template, step, store)
        except DamagedError as error:
            older = [other for other in self.steps() if other < step]
            if not older:
                raise
            raise DamagedError(
                f"{error}; the save before it is at step {older[-1]}: move {self.path(step)} away "
                "to go on from there"
            ) from error

    def _restore(
        self, emb: EmbeddingCollection, template: Any, step: int, store: RowStore | None
    ) -> Restored:
        path = self.path(step)
        manifest = read_manifest(path)
        if manifest.get("step") != step:
            raise CheckpointError(f"{path}: holds step {manifest.get('step')}; was it renamed?")
        check_files(path, manifest)
        run = read_host_state(path)
        others = {}
        for name in manifest.get("others", []):
            # Each needs buffers of its own: a template's are donated.
            other = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf.copy(), tree))(template)
            others[name] = load_state(
                path / OTHERS / name, emb, other, allow_new=self.allow_new
            ).state
        loaded = load_state(path, emb, template, allow_new=self.allow_new, store=store)
        return Restored(loaded.state, step, run, others, loaded.new, loaded.changed)

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _write(self, step: int, snapshots: Snapshots, host: HostState, notes: Any) -> None:
        mesh = snapshots[""].emb.mesh
        first = is_writer(mesh)
        final = self.path(step)
        temporary = final.with_name(f"{final.name}.tmp")
        with contextlib.ExitStack() as lock:
            with agree(mesh, final):
                if first:
                    make_room(self.folder, sum(s.nbytes for s in snapshots.values()), lock)
            write_and_publish(
                mesh, temporary, final, partial(write_save, temporary, snapshots, host, notes)
            )
            if first:
                link(self.folder / LATEST, final.name)
                self._delete_old(step)

    def _delete_old(self, newest: int) -> None:
        steps = sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdecimal())
        kept = {newest, *steps[-self.keep :], *self._best_of(steps)}
        for step in set(steps) - kept:
            remove(self.path(step))

    def _best_of(self, steps: list[int]) -> list[int]:
        """The save with the best metric; the earlier of two equal ones."""
        if self.best is None:
            return []
        values = {}
        for step in steps:
            with contextlib.suppress(CheckpointError):
                value = read_manifest(self.path(step)).get("metrics", {}).get(self.best)
                if value is not None:
                    values[step] = value
        sign = 1 if self.mode == "max" else -1
        return [max(values, key=lambda step: (sign * values[step], -step))] if values else []

    def best_step(self) -> int | None:
        """Step of the save with the best metric; None where none has it."""
        found = self._best_of(self.steps())
        return found[0] if found else None


def _finite_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
