# SPDX-License-Identifier: Apache-2.0
"""Compiled programs as text: their instructions, and what can be counted of them.

Without pytest, as `compiled_checks`, which see.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b(?:pred|[suf]\d+|bf16|f8\w*|c\d+)\[([\d,]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")


def _num_elements(dims):
    """Of dimensions as text, ``3,4``."""
    return math.prod(int(dim) for dim in dims.split(",") if dim)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a compiled program."""

    name: str
    opcode: str
    result: str
    """Shape, or tuple of shapes."""
    line: str

    @property
    def most_elements(self) -> int:
        """Elements of the largest array of the result."""
        return max(map(_num_elements, _ARRAY.findall(self.result)), default=0)


def instructions(text):
    """All instructions of all computations, those inside fusions and loops too."""
    found = []
    for line in text.splitlines():
        match = _INSTRUCTION.match(_COMMENT.sub("", line))
        if match is None:
            continue
        rest = match[3]
        if rest.startswith("("):
            end = _end_of_tuple(rest)
            result, rest = rest[:end], rest[end:]
        else:
            result, _, rest = rest.partition(" ")
        opcode = rest.strip().partition("(")[0]
        found.append(Instruction(match[2], opcode, result, line.strip()))
    return found


def arguments(text):
    """Elements of each argument of a program, and the numbers of those that results alias."""
    header = _COMMENT.sub("", text.partition("\n")[0])
    shapes = _ARRAY.findall(re.search(r"entry_computation_layout=\{\((.*?)\)->", header)[1])
    aliased = {int(n) for n in re.findall(r": \((\d+), \{\}, (?:may|must)-alias\)", header)}
    return [_num_elements(shape) for shape in shapes], aliased


def _end_of_tuple(text):
    """Where the parenthesis closes that ``text`` begins with."""
    depth = 0
    for end, char in enumerate(text, start=1):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return end
    raise ValueError(f"no end: {text}")


CARRIES = {"parameter", "get-tuple-element", "tuple", "bitcast", "fusion", "while", "call"}
"""Opcodes that hand a table on. What a fusion, loop or call does is read inside of it."""

UPDATES = {"scatter", "dynamic-update-slice"}
"""Opcodes that write rows into the table they are given, in place unless there is a copy."""


def num_updates(instruction):
    """Arrays that an instruction updates: one, or those that a kernel is given to write into.

    A kernel that also has a result of its own counts as none.
    """
    if instruction.opcode in UPDATES:
        return 1
    if instruction.opcode != "custom-call":
        return 0
    aliased = len(re.findall(r"\{\d*\}: \(\d+, \{\}", instruction.line))
    return aliased if aliased == len(_ARRAY.findall(instruction.result)) else 0


COLLECTIVES = ("all-to-all", "all-reduce", "all-gather", "reduce-scatter", "collective-permute")


def table_sized(fact):
    """Instructions whose result holds an array of at least a table's number of rows."""
    return [i for i in instructions(fact["text"]) if i.most_elements >= fact["min_rows"]]


def count_collectives(fact):
    """Number of collectives by kind; a start and its done are one."""
    counts = Counter(i.opcode.removesuffix("-start") for i in instructions(fact["text"]))
    return {kind: counts[kind] for kind in COLLECTIVES}
