# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed in the middle of anything end as if they had not been."""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("JAXSPARSE_KILLS", "3"))
"""`make test-all` makes ten."""


@pytest.mark.slow
def test_a_run_killed_again_and_again_equals_one_that_was_not(tmp_path: pathlib.Path) -> None:
    seed = int(os.environ.get("JAXSPARSE_KILL_SEED", random.SystemRandom().randrange(2**31)))
    command = [sys.executable, "-m", "tests.ckpt.killed_run", str(tmp_path), str(KILLS), str(seed)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    print(done.stdout)
    assert done.returncode == 0 and done.stdout.endswith("equal\n"), done.stdout + done.stderr
