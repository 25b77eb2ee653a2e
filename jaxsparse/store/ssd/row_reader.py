# SPDX-License-Identifier: Apache-2.0
"""Rows from where they are: memory, or files, close together or far apart."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from jaxsparse.store.ssd.checksums import Bytes
from jaxsparse.store.ssd.counts import Counts
from jaxsparse.store.ssd.dense import is_dense, read_dense
from jaxsparse.store.ssd.files import SegmentFiles
from jaxsparse.store.ssd.layout import ROW_MASK
from jaxsparse.store.ssd.open_files import OpenFiles
from jaxsparse.store.ssd.scattered import Implementation, open_reader
from jaxsparse.store.ssd.wanted import Wanted


class RowReader:
    """Reads rows of segments that stay until it is done."""

    def __init__(
        self,
        files: SegmentFiles,
        row_bytes: int,
        direct: bool,
        implementation: Implementation | None,
        counts: Counts,
    ) -> None:
        """See `open_reader`; ``files`` reads rows that lie close together."""
        self.open_files = OpenFiles(direct)
        self._files, self._row_bytes, self._counts = files, row_bytes, counts
        self._far = open_reader(self.open_files, files.damaged, direct, implementation)

    @property
    def implementation(self) -> Implementation:
        """Of what reads rows that lie far apart."""
        return self._far.implementation

    def read(self, wanted: Sequence[Wanted], num_rows: int) -> Bytes:
        """``[num_rows, row_bytes]``: what is wanted, which fills it.

        Raises:
            DamagedSegmentError: a row is not what was written.
        """
        out = np.empty((num_rows, self._row_bytes), np.uint8)
        start = time.perf_counter()
        self.read_into(wanted, out)
        micros = round((time.perf_counter() - start) * 1e6)
        self._counts.add(reads=1, read_rows=num_rows, read_us=micros)
        return out

    def read_into(self, wanted: Sequence[Wanted], out: Bytes) -> None:
        """As `read`, into an array."""
        close, far = [], []
        for one in wanted:
            if one.rows is not None:
                out[one.targets] = one.rows[one.locations & ROW_MASK]
            elif is_dense(one):
                close.append(one)
            else:
                far.append(one)
        if far:
            self._far.read(far, out)
        if close:
            read_dense(self._files, close, out)
        self._counts.add(
            scattered_rows=sum(one.locations.size for one in far),
            dense_rows=sum(one.locations.size for one in close),
        )

    def close(self) -> None:
        """Frees what it holds; nobody reads any more."""
        self._far.close()
        self.open_files.close()
