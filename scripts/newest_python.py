# SPDX-License-Identifier: Apache-2.0
"""Print the newest final CPython on this machine, if its minor version is above this one's."""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys

PROBE = (
    "import ensurepip, sys, venv; v = sys.version_info;"
    "assert sys.implementation.name == 'cpython' and v.releaselevel == 'final';"
    "print(v.major, v.minor, v.micro, sys._base_executable)"
)


def candidates() -> list[str]:
    """Paths of interpreters: every ``python3.N`` on the PATH, and those pyenv installed."""
    pyenv_root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    paths = glob.glob(os.path.join(pyenv_root, "versions", "3.*", "bin", "python3.*"))
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        paths += glob.glob(os.path.join(folder, "python3.*"))
    return [path for path in paths if re.fullmatch(r"python3\.\d+", os.path.basename(path))]


def probe(path: str) -> tuple[tuple[int, ...], str] | None:
    """Version and real path of an interpreter that runs and can make environments, else None."""
    try:
        done = subprocess.run(
            [path, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    major, minor, micro, executable = done.stdout.strip().split(maxsplit=3)
    return (int(major), int(minor), int(micro)), executable


def newest() -> str | None:
    """Path of the newest interpreter whose minor version is above the running one's."""
    found = [result for path in sorted(set(candidates())) if (result := probe(path))]
    newer = [result for result in found if result[0][:2] > sys.version_info[:2]]
    return max(newer)[1] if newer else None


if __name__ == "__main__":
    print(newest() or "")
