# SPDX-License-Identifier: Apache-2.0
"""All a row store has of one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import numpy as np
import numpy.typing as npt

from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.processes import is_shared
from jaxsparse.resident import ResidentTable, most_rows
from jaxsparse.specs import TableSpec
from jaxsparse.store.blocks import codes_of
from jaxsparse.store.host_rows import HostRows
from jaxsparse.store.known_rows import KnownRows, rates
from jaxsparse.store.owners import RowOwners
from jaxsparse.store.residency import EMPTY, Residency
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
        self._process_of_shard: npt.NDArray[np.int32] | None = None
        if is_shared(emb.mesh) and not self.slab.replicated:
            devices = emb.mesh.devices.flat
            self._process_of_shard = np.array([d.process_index for d in devices], np.int32)
        self.owners = RowOwners(self.process_of(self.code_at))
        self.residency = self.new_residency()
        tiers = spec.tiers
        words = num_words(self.slab)
        disks = None
        if tiers is not None and tiers.ssd:
            folders = [_own_folder(emb, Path(folder)) for folder in tiers.ssd]
            disks = _open_disks(spec, folders, 4 * words, direct, discard)
        host_rows = None if tiers is None else tiers.host_rows
        if host_rows is not None and self.owners.processes is not None:
            host_rows = -(-host_rows // self.owners.processes.size)
        self.host = HostRows(most_rows(spec), words, host_rows, disks)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its slots."""
        return 4 * self.host.ram.num_words

    def process_of(self, codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int32] | None:
        """Process ``[n]`` whose devices have the rows of codes; None where each has all."""
        if self._process_of_shard is None:
            return None
        return self._process_of_shard[codes // self.slab.rows_per_shard]

    def new_residency(self) -> Residency:
        """With all places free."""
        return Residency(self.spec.name, self.code_at.size, self.owners.group_at)

    def tier_rows(self) -> tuple[int, int, int]:
        """Rows on the devices, in memory and on disks: those that this process has."""
        disks = self.host.disks
        on_disk = 0 if disks is None else disks.rows()[0]
        resident = self.residency.num_resident
        if self.owners.processes is not None:
            rows = self.residency.row_at
            resident = int(self.owners.has(rows[rows != EMPTY]).sum())
        return resident, len(self.host.ram), on_disk

    def stats(self) -> dict[str, Any]:
        """For people; see `RowStore.stats`."""
        known, host = self.known, self.host
        stats: dict[str, Any] = {
            "size": len(known),
            **known.totals,
            **rates(known.totals),
            "device_rows": self.tier_rows()[0],
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
        parts = self.known, self.residency, self.host, self.code_at, self.owners
        return sum(int(part.nbytes) for part in parts)


def _own_folder(emb: EmbeddingCollection, folder: Path) -> Path:
    """Of a process: those of one machine may be given the same folders."""
    return folder / f"process-{jax.process_index()}" if is_shared(emb.mesh) else folder


def _open_disks(
    spec: TableSpec,
    folders: list[Path],
    row_bytes: int,
    direct: bool,
    discard: bool,
) -> SegmentStore:
    name = quote(spec.name, safe="")
    paths = [folder / name for folder in folders]
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
