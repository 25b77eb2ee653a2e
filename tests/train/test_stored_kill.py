# SPDX-License-Identifier: Apache-2.0
"""Runs with rows on disks that are killed in the middle of anything end as if they had not been."""

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
def test_a_run_with_a_row_store_killed_again_and_again_equals_one_that_was_not(tmp_path):
    seed = int(os.environ.get("JAXSPARSE_KILL_SEED", random.SystemRandom().randrange(2**31)))
    command = [sys.executable, "-m", "tests.train.killed_store", str(tmp_path), str(KILLS)]
    done = subprocess.run(
        [*command, str(seed)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(f"seed {seed}", done.stdout)
    assert done.returncode == 0 and done.stdout.endswith("equal\n"), done.stderr[-3000:]
