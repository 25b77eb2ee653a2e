# SPDX-License-Identifier: Apache-2.0
"""A run with a row store on disks, killed with SIGKILL again and again and taken up each time; then
compared with one that was not. Run by ``test_stored_kill.py`` in a process of its own.

A child is forked for every attempt before jax starts its backend, so that imports are paid once.
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
import sys
import threading
import traceback
import warnings

os.environ["JAX_PLATFORMS"] = "cpu"
warnings.filterwarnings("ignore", message=".*os.fork.*")

import jax  # noqa: E402
import numpy as np  # noqa: E402

import jaxsparse as js  # noqa: E402
from jaxsparse.durable import FAULT  # noqa: E402
from tests.store.checkpoints import SETUPS  # noqa: E402
from tests.train.test_stored import dataset, outcome, trainer_of  # noqa: E402

STEPS, EVERY = 70, 9
POINTS = ("in_arrays", "before_manifest", "before_rename", "after_rename")
SURE = 3
"""Kills before which no attempt can come to the end."""


class Deadly:
    """A dataset that kills the process up to 10 ms after batch ``at`` is drawn."""

    def __init__(self, at):
        self.data, self.at, self.count = dataset(), at, 0
        self.batch_size, self.state, self.restore = 4, self.data.state, self.data.restore

    def __iter__(self):
        for batch in self.data:
            self.count += 1
            if self.count == self.at:
                after_s = random.SystemRandom().uniform(0, 0.01)
                threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            yield batch


def attempt(folder: pathlib.Path, at: int) -> None:
    """Trains to the end, or to where the process is killed."""
    trainer = trainer_of(SETUPS["ssd"](folder / "ssd"))
    saves = js.CheckpointManager(folder / "checkpoints", EVERY, keep=2)
    options = {"checkpoint": saves, "log_every": 20, "progress": False}
    result = trainer.fit(Deadly(at), steps=STEPS, **options)
    leaves = jax.tree.leaves(outcome(trainer, result.state))
    trainer.store.close()
    np.savez(folder / "end.npz", *leaves)


def start(folder: pathlib.Path, fault: str = "", at: int = 0) -> int:
    """How an attempt in a child ended."""
    folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    os.environ[FAULT] = fault
    try:
        attempt(folder, at)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(folder: pathlib.Path, kills: int, seed: int) -> None:
    """Kills, resumes, compares."""
    rng = random.Random(seed)
    assert start(folder / "whole") == 0
    with np.load(folder / "whole" / "end.npz") as file:
        want = dict(file)
    saves = js.CheckpointManager(folder / "part" / "checkpoints", EVERY)
    for number in range(kills):
        if number % 2:
            how = {"at": rng.randint(1, 12)}
        else:
            how = {"fault": f"{rng.choice(POINTS)}:{rng.randint(1, 2)}"}
        status = start(folder / "part", **how)
        print(f"{how}: status {status}; saves {saves.steps()}", flush=True)
        if status == 0 and number >= SURE:
            break
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert start(folder / "part") == 0
    with np.load(folder / "part" / "end.npz") as file:
        got = dict(file)
    assert got.keys() == want.keys() and len(got) > 5
    for name in want:
        assert got[name].tobytes() == want[name].tobytes(), name
    print("equal")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
