# SPDX-License-Identifier: Apache-2.0
"""Bytes a key of a growing key index, in a process of its own: ``benchmarks.index`` starts it."""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from typing import Any

from benchmarks.index_keys import distinct_keys
from benchmarks.report import ROOT, Result
from jaxsparse.store.index import KeyIndex

BATCH = 65_536


def resident_bytes() -> int:
    """Of this process, counted page by page: the sum that is kept at hand may be behind."""
    rollup = pathlib.Path("/proc/self/smaps_rollup").read_text()
    found = next(line for line in rollup.splitlines() if line.startswith("Rss:"))
    return int(found.split()[1]) * 1024


def grow(least: int, most: int) -> Result:
    """Inserts ``most`` keys, and looks after every batch from ``least`` keys on."""
    index = KeyIndex(2**31 - 2)
    KeyIndex(BATCH).insert(distinct_keys(1, 0, BATCH))  # what is loaded once is loaded now
    base = resident_bytes()
    worst: dict[str, dict[str, Any]] = {name: {"bytes": 0.0} for name in ("own", "resident")}
    for begin in range(0, most, BATCH):
        index.insert(distinct_keys(0, begin, min(begin + BATCH, most)))
        if len(index) < least:
            continue
        for name, total in (("own", index.nbytes), ("resident", resident_bytes() - base)):
            if total / len(index) > worst[name]["bytes"]:
                worst[name] = {"bytes": total / len(index), "keys": len(index)}
    assert len(index) == most, f"{most} different keys gave {len(index)} rows"
    return {"least_keys": least, "most_keys": most, "worst": worst}


def measure_alone(least: int, most: int) -> Result:
    """`grow` in a new process."""
    command = [sys.executable, "-m", "benchmarks.index_memory", str(least), str(most)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    told: Result = json.loads(done.stdout)
    return told


def main() -> None:
    """Prints the result as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("least", type=int, help="keys from which on bytes are looked at")
    parser.add_argument("most", type=int, help="keys at the end")
    options = parser.parse_args()
    print(json.dumps(grow(options.least, options.most)))


if __name__ == "__main__":
    main()
