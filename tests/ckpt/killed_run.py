# SPDX-License-Identifier: Apache-2.0
"""A run killed with SIGKILL again and again, and taken up each time; then compared with one that
was not. Prints what it does; run by ``test_kill.py`` in a process of its own.

A child is forked for every attempt before jax starts its backend, so that imports are paid once.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import sys
import time
import traceback
import warnings

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
warnings.filterwarnings("ignore", message=".*os.fork.*")

import jax  # noqa: E402
import numpy as np  # noqa: E402

import jaxsparse as js  # noqa: E402
from jaxsparse.ckpt.durable import FAULT_POINTS  # noqa: E402
from jaxsparse.durable import FAULT  # noqa: E402
from tests.ckpt import runs  # noqa: E402

STEPS, EVERY, KEEP = 52, 6, 2
ARRAYS = 2 * 5  # a save holds the state and the best one, of five arrays of tables each


def attempt(folder: pathlib.Path, background: bool) -> None:
    """Trains to the end, or to where the process is killed."""
    manager = js.CheckpointManager(
        folder / "checkpoints", EVERY, KEEP, best="auc", background=background
    )
    with open(folder / "ids.jsonl", "a", buffering=1) as log:

        def write(entry: object) -> None:
            log.write(json.dumps(entry) + "\n")

        write({"resume": manager.latest() or 0})
        trainer = runs.make_trainer()
        result = trainer.fit(
            runs.train_data(write),
            steps=STEPS,
            eval_dataset=runs.eval_data(),
            callbacks=[js.KeepBest("auc")],
            log_every=4,
            checkpoint=manager,
            metrics_path=folder / "metrics.jsonl",
            progress=False,
        )
    np.savez(folder / "state.npz", **runs.leaves(trainer, result.state))


def start(folder: pathlib.Path, fault: str = "", background: bool = False) -> int:
    """The process id of a child that makes an attempt."""
    folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid:
        return pid
    os.environ[FAULT] = fault
    try:
        attempt(folder, background)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def trained(folder: pathlib.Path) -> tuple[dict[int, list[int]], int]:
    """Row ids by step, as the last attempt that made the step saw them; and the last step drawn.

    The n-th batch after a resume is that step plus n; the last ones may only have been drawn ahead.
    """
    by_step: dict[int, list[int]] = {}
    step = 0
    path = folder / "ids.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        entry = json.loads(line)
        if isinstance(entry, dict):
            step = entry["resume"]
            by_step = {s: ids for s, ids in by_step.items() if s <= step}
        else:
            step += 1
            by_step[step] = entry
    return by_step, step


def kill_at(folder: pathlib.Path, at: float, step_s: float, background: bool) -> None:
    """Lets an attempt run to step ``at``, whose fraction is a share of a step's time."""
    pid = start(folder, background=background)
    while trained(folder)[1] < int(at) + 1:
        if os.waitpid(pid, os.WNOHANG)[0]:
            raise SystemExit(f"an attempt ended before step {at:.2f}")
        time.sleep(0.002)
    time.sleep((at - int(at)) * step_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def kill_at_start(folder: pathlib.Path, after_s: float, background: bool) -> None:
    """Kills an attempt while it starts, restores or compiles, at the latest at its first batch."""
    before = trained(folder)[1] if folder.exists() else 0
    begun = js.CheckpointManager(folder / "checkpoints").latest() or 0
    pid = start(folder, background=background)
    deadline = time.perf_counter() + after_s
    while time.perf_counter() < deadline and trained(folder)[1] in (before, begun):
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def kill_in_save(
    folder: pathlib.Path, at: float, point: str, rng: random.Random, background: bool
) -> None:
    """Lets an attempt run into the first save at or after step ``at``."""
    begun = js.CheckpointManager(folder / "checkpoints").latest() or 0
    count = max(1, -(-int(at) // EVERY) - begun // EVERY)
    if point == "in_arrays":
        count = (count - 1) * ARRAYS + rng.randint(1, 5)
    if point == "in_delete":
        count = 1  # not every save deletes one
    pid = start(folder, f"{point}:{count}", background)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        raise SystemExit(f"an attempt passed the fault point {point}:{count}: status {status}")


def draw_kills(rng: random.Random, kills: int) -> list[tuple[float, str]]:
    """Steps in ascending order, each with a fault point, ``"start"`` or ``"step"``."""
    ats = sorted(rng.uniform(0, STEPS - EVERY - 2) for _ in range(kills))
    in_saves = set(rng.sample(range(kills), -(-kills // 3)))
    drawn = []
    for index, at in enumerate(ats):
        # Only behind some saves, and before some more, is there surely one to delete.
        deletes = 4 * EVERY < at < STEPS - 3 * EVERY
        points = [p for p in FAULT_POINTS if deletes or p != "in_delete"]
        drawn.append((at, rng.choice(points if index in in_saves else ["start", "step", "step"])))
    return drawn


def main(folder: pathlib.Path, kills: int, seed: int) -> None:
    """Kills, resumes, compares."""
    rng = random.Random(seed)
    began = time.perf_counter()
    assert os.waitpid(start(folder / "whole"), 0)[1] == 0
    run_s = time.perf_counter() - began
    # Those that follow are killed, perhaps while they write into a cache of compiled programs.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    print(f"seed {seed}, {kills} kills; the whole run takes {run_s:.1f} s")
    part = folder / "part"
    for at, kind in draw_kills(rng, kills):
        background = rng.random() < 0.5
        if kind == "start":
            kill_at_start(part, rng.uniform(0, run_s / 2), background)
        elif kind == "step":
            kill_at(part, at, run_s / STEPS, background)
        else:
            kill_in_save(part, at, kind, rng, background)
        saved = js.CheckpointManager(part / "checkpoints", EVERY, KEEP)
        left = sorted(p.name for p in saved.folder.iterdir()) if saved.folder.exists() else []
        saves = "background" if background else "stopped"
        print(f"killed at {kind} {at:.2f}, saves {saves}; latest {saved.latest()}; {left}")
    assert os.waitpid(start(part), 0)[1] == 0
    compare(folder / "whole", part)
    print("equal")


def compare(whole: pathlib.Path, part: pathlib.Path) -> None:
    """Asserts that two runs cannot be told apart."""
    with np.load(whole / "state.npz") as want, np.load(part / "state.npz") as got:
        runs.assert_same(dict(got), dict(want))
    rows = [runs.without_times(runs.rows_of(f / "metrics.jsonl")) for f in (whole, part)]
    assert rows[0] == rows[1]
    want_ids, got_ids = trained(whole)[0], trained(part)[0]
    steps = range(1, STEPS + 1)
    assert [got_ids[s] for s in steps] == [want_ids[s] for s in steps]
    per_epoch = -(-runs.ROWS // runs.BATCH)
    for first in range(1, STEPS - per_epoch + 2, per_epoch):
        ids = [i for s in range(first, first + per_epoch) for i in got_ids[s]]
        assert sorted(ids) == list(range(runs.ROWS)), "each row once in an epoch"
    names = sorted(p.name for p in (part / "checkpoints").iterdir())
    assert not [n for n in names if ".tmp" in n or ".del" in n], names


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", False)
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
