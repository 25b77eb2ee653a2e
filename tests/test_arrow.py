# SPDX-License-Identifier: Apache-2.0
"""What arrow's threads may hold after Python has ended."""

from __future__ import annotations

import sys

import pyarrow as pa
from pyarrow import csv

from jaxsparse.arrow import reader_of


def test_a_reader_holds_no_object_of_python() -> None:
    """Arrow's I/O thread dropping the last reference to one aborts a process that is ending."""
    data = b"a,b\n" + b"1,2\n" * 1000
    before = sys.getrefcount(data)
    reader = reader_of(data)
    assert sys.getrefcount(data) == before
    assert csv.read_csv(reader).num_rows == 1000
    # The counter-example holds it for as long as it lives.
    direct = pa.BufferReader(data)
    assert sys.getrefcount(data) > before
    direct.close()
