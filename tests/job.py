# SPDX-License-Identifier: Apache-2.0
"""Runs a scenario of `tests.scenarios` in several processes, started as `jaxsparse launch` does.

As a program it is one of those processes: ``python tests/job.py OUT NAME ...``.
"""

from __future__ import annotations

import fcntl
import os
import pathlib
import pickle
import subprocess
import sys

LAUNCH = "import sys; from jaxsparse.launch import launch; n, d, *command = sys.argv[1:]; "
LAUNCH += "sys.exit(launch(command, int(n), int(d)))"

SMALL_LOG = [
    'data.config.fields=[{name="a",vocabulary_size=50},{name="b",vocabulary_size=40,mean_length=2}]',
    "data.config.products=[]",
    "model.bottom=[4,16]",
    "model.top=[8]",
    "data.train_rows=3000",
    "data.test_rows=1000",
    "train.batch_size=1000",
]
"""The built-in example with two features, for jobs that are about processes: quick to compile."""


def run(command, processes, devices, timeout=150, **options):
    """The finished launcher of a command."""
    return subprocess.run(
        [sys.executable, "-c", LAUNCH, str(processes), str(devices), sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **options,
    )


def shared_results(tmp_path_factory, names, processes=2, devices=2):
    """`results`, run once for all workers of a test session."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    out = root / f"job_{processes}x{devices}_{'_'.join(names)}"
    out.mkdir(exist_ok=True)
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out / "done").exists():
            results(out, names, processes, devices)
            (out / "done").touch()
    return load(out, names, processes)


def load(out, names, processes):
    return {
        name: [
            pickle.loads((pathlib.Path(out) / f"{name}.{index}").read_bytes())
            for index in range(processes)
        ]
        for name in names
    }


def results(out, names, processes=2, devices=2):
    """By scenario, what it returned in each process."""
    root = pathlib.Path(__file__).parent.parent
    done = run([__file__, str(out), *names], processes, devices, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    return load(out, names, processes)


def main(out, names):
    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
    import jax

    import jaxsparse as js
    from jaxsparse import distributed
    from tests import scenarios

    scenarios.dies_at("import")
    job = distributed.initialize()

    jax.config.update("jax_numpy_rank_promotion", "raise")
    for name in names:
        result = getattr(scenarios, name)(js.make_mesh(), job.process_id, job.num_processes)
        (pathlib.Path(out) / f"{name}.{job.process_id}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
