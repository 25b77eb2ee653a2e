# SPDX-License-Identifier: Apache-2.0
"""A store killed with SIGKILL again and again, opened again and compared each time (case E18).

Run by ``test_ssd_crash.py`` in a process of its own, which forks a child for every attempt and
itself touches no store. A child opens the store, compares it with what the last one had written
down, and goes on until it dies: what is found must be the state of the last commit that returned,
or of the one that was under way.
"""

from __future__ import annotations

import os
import pathlib
import pickle
import random
import signal
import sys
import time
import traceback
import warnings

os.environ["JAX_PLATFORMS"] = "cpu"
warnings.filterwarnings("ignore", message=".*os.fork.*")

import numpy as np  # noqa: E402

from jaxsparse import durable  # noqa: E402
from jaxsparse.ops.native import library  # noqa: E402
from jaxsparse.store.ssd import FAULT_POINTS, SegmentStore, journal  # noqa: E402
from tests.store.ssd_rows import keys_of, open_store, row, rows_of  # noqa: E402

Versions = dict[int, int]


class Attempt:
    """A child's store, and what it must hold."""

    def __init__(self, folder: pathlib.Path, seed: int) -> None:
        self.folder = folder
        self.rng = np.random.default_rng(seed)
        self.ready = folder / "ready"
        self.store: SegmentStore = open_store(folder, segment_bytes=8192 + 64 + 64 * 64)
        self.versions, self.at = self.compare()
        self.next_version = 1 + max([seed << 32, *self.versions.values()])
        self.write_down("ended")

    def compare(self) -> tuple[Versions, dict[int, int]]:
        """What is in the store, which is one of the states written down."""
        keys, locations = self.store.entries()
        rows = [bytes(one) for one in self.store.read(locations)]
        at = dict(zip(keys.tolist(), locations.tolist(), strict=True))
        assert len(at) == len(keys), "a key comes twice"
        found = dict(zip(keys.tolist(), rows, strict=True))
        states = [pickle.loads(path.read_bytes()) for path in self.notes() if path.exists()]
        for state in states or [{}]:
            if found == {key: row(key, version) for key, version in state.items()}:
                return state, at
        raise AssertionError(f"{len(found)} rows, of none of {[len(s) for s in states]} states")

    def notes(self) -> list[pathlib.Path]:
        return [self.folder / "ended", self.folder / "begun"]

    def write_down(self, name: str) -> None:
        temporary = self.folder / "note"
        temporary.write_bytes(pickle.dumps(self.versions))
        temporary.rename(self.folder / name)

    def change(self) -> None:
        keys = self.rng.choice(400, 150, replace=False).tolist()
        new = dict.fromkeys(keys, self.next_version)
        self.next_version += 1
        old = [self.at[key] for key in keys if key in self.at]
        locations = self.store.append(keys_of(new), rows_of(new)).tolist()
        self.store.release(np.array(old, np.int64))
        self.versions |= new
        self.at |= dict(zip(keys, locations, strict=True))
        for key in self.rng.choice(keys, 10, replace=False).tolist():
            self.store.release(np.array([self.at.pop(key)]))
            del self.versions[key]

    def commit(self, compact: bool) -> None:
        self.write_down("begun")
        if compact:
            old, new = self.store.compact(0.4)
            moved = dict(zip(old.tolist(), new.tolist(), strict=True))
            self.at = {key: moved.get(at, at) for key, at in self.at.items()}
        self.store.flush()
        self.write_down("ended")

    def run(self) -> None:
        self.ready.touch()
        for number in range(1000):
            self.change()
            self.commit(compact=number % 3 == 2)
            if number % 10 == 9:  # all of it, besides at the begin of each attempt
                self.compare()


def attempt(folder: pathlib.Path, seed: int, fault: str) -> int:
    """The process id of a child."""
    (folder / "ready").unlink(missing_ok=True)
    pid = os.fork()
    if pid:
        return pid
    os.environ[durable.FAULT] = fault
    journal.TAIL_BYTES = 4000
    try:
        Attempt(folder, seed).run()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def died(pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status


def main(folder: pathlib.Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    library.is_available()  # compiled and loaded once, before all forks
    print("seed", seed)
    number = 0
    for point in FAULT_POINTS:
        for count in (1, rng.randint(2, 6)):
            number += 1
            died(attempt(folder, number, f"{point}:{count}"))
            print("killed at", point, count, flush=True)
    for _ in range(kills):
        number += 1
        pid = attempt(folder, number, "")
        while not (folder / "ready").exists():
            time.sleep(0.001)
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "ended by itself"
        time.sleep(rng.random() * 0.15)
        os.kill(pid, signal.SIGKILL)
        died(pid)
    died(attempt(folder, number + 1, "ssd_after_manifest:40"))
    print("equal")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
