# SPDX-License-Identifier: Apache-2.0
"""Field cases are faults others met in systems of this kind; each has an id and tests named by it.

``test_c14_...`` tests row C14. The first letter is the theme: A bags, B ids, C optimizers,
D meshes, E row stores, F checkpoints and data, G metrics, H readers, I compiling. This file holds
the list of rows that must have a test, so that none is lost when tests are renamed; the others need
parts that are not built yet.
"""

from __future__ import annotations

import pathlib
import re

ROWS = {
    "a": "01 02 03 05 06 07 09 12 13 14 15 16",
    "b": "02 03 04 06 07 08 09 10 12 14 15 18",
    "c": "02 03 04 05 06 07 08 09 10 11 12 14 15 16 19 20 21 22 23 26",
    "d": "01 02 03 04 05 06 08 09 10 11 12 13 14 15 16 17",
    "e": "02 03 04 05 06 07 08 09 10 11 12 13 14 15 17 19",
    "f": "01 02 03 04 05 06 07 08 09 10 12 13 14 15 17 24 25",
    "g": "01 02 03 05 06 07",
    "h": "01 04 05 06 07 08 09 10 11 12 13 14 16 17 19 20 21",
    "i": "02",
}


ELSEWHERE = {
    "test_program_counts.py": "I01 I02 I03",
    "test_memory.py": "I04 I05",
    "test_neighbour_rows.py": "I06 I07 I09",
    "test_64_bits.py": "I10",
    "store/test_index.py": "E05",
    "store/test_ssd_crash.py": "E18",
}
"""Rows whose tests lie beside others of their kind; their docstrings name them."""


def find_rows() -> dict[str, list[str]]:
    """Names of the tests here, by row id."""
    found: dict[str, list[str]] = {}
    for path in sorted(pathlib.Path(__file__).parent.glob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE):
            row = re.match(r"test_([a-z]\d\d)_", name)
            if row:
                assert path.name.startswith(f"test_{row[1][0]}_"), f"{name} lies in {path.name}"
                found.setdefault(row[1], []).append(name)
    return found


def test_every_row_has_a_test_and_every_test_a_row() -> None:
    wanted = {theme + number for theme, numbers in ROWS.items() for number in numbers.split()}
    found = {row for row in find_rows() if row[0] in ROWS}
    assert found == wanted, f"untested: {wanted - found}, not listed: {found - wanted}"


def test_rows_that_are_tested_elsewhere_are_there() -> None:
    for name, rows in ELSEWHERE.items():
        text = (pathlib.Path(__file__).parents[1] / name).read_text()
        docstrings = re.findall(r'def test_\w+\([^"]*"""(.*?)"""', text, re.DOTALL)
        named = set(re.findall(r"\b[A-I]\d\d\b", " ".join(docstrings)))
        assert named >= set(rows.split()), f"{name}: {set(rows.split()) - named}"
