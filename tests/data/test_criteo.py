# SPDX-License-Identifier: Apache-2.0
"""Criteo's format: the fast path and the slow one agree on every line, however damaged."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from jaxsparse.data.criteo import CATEGORIES, MISSING, CriteoParser
from jaxsparse.data.hexadecimal import parse_hex
from jaxsparse.data.text_blocks import Lines
from tests.data.files import criteo_bytes, criteo_cells, expected_criteo

NOISE = b"\t\t\n\r\"'x-+ .aAfFgG059\x00\xff\xc3NnIi,"


def damaged(seed: int) -> bytes:
    """Forty lines with some bytes replaced, taken out or put in."""
    rng = np.random.default_rng(seed)
    data = bytearray(criteo_bytes(criteo_cells(40, seed)))
    for _ in range(rng.integers(1, 12)):
        at, byte = int(rng.integers(0, len(data))), int(rng.choice(list(NOISE)))
        kind = rng.integers(0, 3)
        if kind == 0:
            data[at] = byte
        elif kind == 1:
            del data[at]
        else:
            data.insert(at, byte)
    return bytes(data)


def good_lines(data: bytes) -> list[list[str]]:
    """Cells of the lines that are rows, by the format's definition in plain Python."""
    rows = []
    for line in data.replace(b"\r\n", b"\n").removesuffix(b"\n").split(b"\n"):
        cells = line.decode(errors="replace").split("\t")
        if (
            len(cells) == 40
            and cells[0] in ("0", "1")
            and all(re.fullmatch("(-?[0-9]+)?", cell) for cell in cells[1:14])
            and all(-(2**63) <= int(cell or 0) < 2**63 for cell in cells[1:14])
            and all(re.fullmatch("[0-9a-fA-F]{0,8}", cell) for cell in cells[14:])
        ):
            rows.append(cells)
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_damaged_lines(seed: int) -> None:
    data = damaged(seed)
    lines = Lines(data, "a.tsv", 1, ())
    batch, bad = CriteoParser(on_bad_row="skip").parse(lines)
    rows = good_lines(data)
    count = len(data.removesuffix(b"\n").split(b"\n"))
    assert batch.num_samples + bad.total == count
    labels, dense, keys = zip(*map(expected_criteo, rows), strict=True)
    assert batch.labels.tolist() == list(labels)
    np.testing.assert_allclose(batch.dense, dense, rtol=1e-6)
    got = np.stack([np.asarray(batch.features[name]) for name in CATEGORIES], 1)
    assert got.tolist() == list(keys)


@pytest.mark.parametrize("categories", ["hex", "string"])
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize(
    ("cell", "is_good"),
    [
        ("1 ", False),
        (" 1", False),
        ("0x10", False),
        ("+1", False),
        ("-0", True),
        ("007", True),
        ("9223372036854775807", True),
        ("9223372036854775808", False),
        ("-9223372036854775808", True),
        ("0" * 22 + "5", True),
        ("1e3", False),
        ("NaN", False),
        ("null", False),
    ],
)
def test_integers(cell: str, is_good: bool, broken: bool, categories: Any) -> None:
    """Which cells are integers does not depend on whether another line is broken."""
    rows = criteo_cells(2)
    rows[0][5] = cell
    data = criteo_bytes(rows) + b"rubbish\n" * broken
    parser = CriteoParser(on_bad_row="skip", categories=categories)
    batch, bad = parser.parse(Lines(data, "a.tsv", 1, ()))
    assert batch.num_samples == 1 + is_good
    assert bad.counts["integer"] == 1 - is_good


def test_hexadecimal_numbers() -> None:
    texts = ["0", "f", "F", "12345678", "ffffffff", "DEADbeef", "0000000a", "1b3"]
    lengths = np.array([len(text) for text in texts])
    data = np.frombuffer("".join(texts).encode(), np.uint8)
    got = parse_hex(data, np.cumsum(lengths) - lengths, lengths)
    assert got is not None
    assert got.tolist() == [int(text, 16) for text in texts]
    assert max(got) < MISSING


@pytest.mark.parametrize("byte", sorted(set(range(256)) - set(b"0123456789abcdefABCDEF")))
def test_no_other_byte_is_a_digit(byte: int) -> None:
    for at in (0, 3, 7):
        cell = bytearray(b"1234567f")
        cell[at] = byte
        text = np.frombuffer(b"00000000" + bytes(cell), np.uint8)
        assert parse_hex(text, np.array([0, 8]), np.array([8, 8])) is None
