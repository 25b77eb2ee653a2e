# SPDX-License-Identifier: Apache-2.0
"""All a row store has of one table."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.resident import ResidentTable, most_rows
from jaxsparse.specs import TableSpec
from jaxsparse.store.blocks import codes_of
from jaxsparse.store.host_rows import HostRows
from jaxsparse.store.known_rows import KnownRows, rates
from jaxsparse.store.residency import Residency
from jaxsparse.store.row_format import num_words
from jaxsparse.store.ssd import SegmentStore, StoreError


class TableStore:
    """Keys, places on the devices, and rows on the host of one table."""

    def __init__(
        self, emb: EmbeddingCollection, spec: TableSpec, direct: bool, discard: bool = False
    ) -> None:
        """Starts without a key; see `RowStore` for the arguments.

        Raises:
            StoreError: a folder of ``tiers.ssd`` cannot be used, or has rows of another run.
        """
        self.spec = spec
        self.slab, number = emb.layout.find(spec.name)
        self.slab_index = emb.layout.slabs.index(self.slab)
        resident = self.slab.tables[number].spec
        assert isinstance(resident, ResidentTable)
        codes = codes_of(emb, spec.name, np.arange(resident.vocabulary_size))
        self.code_at = codes[: resident.device_rows]
        """Code of each place (`codes_of`)."""
        default = resident.default_row
        self.default_code = None if default is None else int(codes[default])
        """Code of the default row; None where every key has its own."""
        self.known = KnownRows(spec)
        self.residency = Residency(spec.name, resident.device_rows)
        tiers = spec.tiers
        words = num_words(self.slab)
        disks = None
        if tiers is not None and tiers.ssd:
            disks = _open_disks(spec, list(tiers.ssd), 4 * words, direct, discard)
        host_rows = None if tiers is None else tiers.host_rows
        self.host = HostRows(most_rows(spec), words, host_rows, disks)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its slots."""
        return 4 * self.host.ram.num_words

    def tier_rows(self) -> tuple[int, int, int]:
        """Rows on the devices, in memory and on disks."""
        disks = self.host.disks
        on_disk = 0 if disks is None else disks.rows()[0]
        return self.residency.num_resident, len(self.host.ram), on_disk

    def stats(self) -> dict[str, Any]:
        """For people; see `RowStore.stats`."""
        known, host = self.known, self.host
        stats: dict[str, Any] = {
            "size": len(known),
            **known.totals,
            **rates(known.totals),
            "device_rows": self.residency.num_resident,
            "host_rows": len(host.ram),
            "ssd_rows": 0,
            "host_bytes": self.nbytes,
            **{f"{name}_bytes": count for name, count in host.moved.items()},
            "index": known.index.implementation,
        }
        if host.disks is not None:
            disks = host.disks.stats()
            stats |= {"ssd_rows": disks["live_rows"], "ssd": disks}
        return stats

    @property
    def nbytes(self) -> int:
        """Host memory in use."""
        return self.known.nbytes + self.residency.nbytes + self.host.nbytes + self.code_at.nbytes


def _open_disks(
    spec: TableSpec,
    folders: list[str | os.PathLike[str]],
    row_bytes: int,
    direct: bool,
    discard: bool,
) -> SegmentStore:
    name = quote(spec.name, safe="")
    paths = [Path(folder) / name for folder in folders]
    disks = SegmentStore(paths, table=spec.name, row_bytes=row_bytes, direct=direct)
    live = disks.stats()["live_rows"]
    if live and discard:
        disks.clear()
    elif live:
        disks.close()
        raise StoreError(
            f"table {spec.name!r}: {paths[0]} holds {live:,} rows of an earlier run, which a new "
            "store cannot tell from its own; give Tiers(ssd=) empty folders, delete these, or let "
            "RowStore(discard_rows=True) do so"
        )
    return disks
