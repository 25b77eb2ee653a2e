# SPDX-License-Identifier: Apache-2.0
"""Stores killed in the middle of anything are as of a commit: the old one or the new one."""

from __future__ import annotations

import os
import pathlib
import random
import re
import subprocess
import sys

import pytest

from jaxsparse.store.ssd import FAULT_POINTS

ROOT = pathlib.Path(__file__).resolve().parents[2]
KILLS = 20


def test_every_fault_point_has_its_place() -> None:
    text = "".join(path.read_text() for path in (ROOT / "jaxsparse/store/ssd").glob("*.py"))
    found = re.findall(r'fault_point\("(\w+)"\)', text)
    assert sorted(found) == sorted(FAULT_POINTS)


@pytest.mark.slow
def test_killed_at_named_points_and_at_random(tmp_path: pathlib.Path) -> None:
    """Case E18: no row without its data is shown, and values are the old or the new ones."""
    seed = int(os.environ.get("JAXSPARSE_KILL_SEED", random.SystemRandom().randrange(2**31)))
    command = [sys.executable, "-m", "tests.store.ssd_child", str(tmp_path), str(KILLS), str(seed)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(done.stdout)
    assert done.returncode == 0 and done.stdout.endswith("equal\n"), done.stdout + done.stderr
