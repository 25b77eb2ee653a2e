# SPDX-License-Identifier: Apache-2.0
"""What every benchmark does with its result: a table to read, JSON to keep, the machine named."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Callable
from typing import Any

import jax

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Result = dict[str, Any]


def machine() -> dict[str, Any]:
    """What was measured on."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def _cpu() -> str:
    """Name, generation and widest vectors: machines of one name differ by half in these figures."""
    info = pathlib.Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    first = info.read_text().partition("\n\n")[0].splitlines()
    told = {name.strip(): value.strip() for name, _, value in (row.partition(":") for row in first)}
    if "model name" not in told:
        return platform.processor()
    flags = told.get("flags", "").split()
    vectors = next((kind for kind in ("avx512f", "avx2") if kind in flags), "no avx2")
    generation = f"family {told.get('cpu family')}, model {told.get('model')}"
    return f"{told['model name']} ({generation}, {vectors})"


def grid(rows: list[list[str]]) -> str:
    """Lines of a table, columns as wide as they need; all but the first to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def describe_machine(result: Result) -> str:
    """The machine of a result, for the head of its table."""
    on = result["machine"]
    return (
        f"{on['cpu']}, {on['cores']} cores, load {on['load_average']:.1f}; device {on['device']}; "
        f"jax {on['jax']}"
    )


def run(
    description: str,
    measure: Callable[[int, int], Result],
    table: Callable[[Result], str],
    *,
    num_rows: int,
) -> Result:
    """Measures as the command line says, prints the table and writes the JSON.

    Args:
        description: of the benchmark; its first line is that of ``--help``.
        measure: of a number of rows and of rounds.
        table: the result for people.
        num_rows: default.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--rows", type=int, default=num_rows, help="rows of the data")
    parser.add_argument("--rounds", type=int, default=5, help="at least 5 for figures to quote")
    parser.add_argument("--out", help="where the JSON goes; default NAME.json")
    options = parser.parse_args()
    result = measure(options.rows, options.rounds)
    save(result, pathlib.Path(options.out or f"{result['benchmark']}.json"))
    print(table(result))
    return result


def run_turns(
    description: str | None,
    measure: Callable[[int], Result],
    table: Callable[[Result], str],
    *,
    rounds: int,
) -> Result:
    """As `run`, for what is measured in turns and kept in `RESULTS`.

    Args:
        description: of the benchmark.
        measure: of a number of turns.
        table: the result for people.
        rounds: default number of turns, fit for figures to quote.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="turns; as many to quote")
    parser.add_argument("--out", type=pathlib.Path, help="where the JSON goes")
    options = parser.parse_args()
    result = measure(options.rounds)
    save(result, options.out or RESULTS / f"{result['benchmark']}.json")
    print(table(result))
    return result


def save(result: Result, path: pathlib.Path) -> None:
    """Writes the JSON; its folder is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def requirement(what: str, got: float, limit: float, *, at_least: bool = True) -> Result:
    """A figure that has to be reached, for the ``requirements`` of a result.

    Args:
        what: is measured.
        got: was measured.
        limit: of it.
        at_least: whether the limit is the least or the most.
    """
    met = got >= limit if at_least else got <= limit
    return {"what": what, "got": got, "limit": limit, "at_least": at_least, "met": bool(met)}


def summary(requirements: list[Result]) -> str:
    """Required figures for people, one a line."""
    return "\n".join(
        f"{'met' if one['met'] else 'NOT MET':8s} {one['what']:66s} "
        f"{one['got']:8.3g}  ({'at least' if one['at_least'] else 'at most'} {one['limit']:g})"
        for one in requirements
    )
