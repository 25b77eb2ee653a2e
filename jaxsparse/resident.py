# SPDX-License-Identifier: Apache-2.0
"""What the devices see of a table whose rows come and go: a plain table of places.

A place is a number below ``device_rows``; which key's row lies in it is the row store's business.
So layout, exchange, kernels and the step are those of a plain table.
"""

from __future__ import annotations

import dataclasses

from jaxsparse.dynamic import Dynamic
from jaxsparse.hashing import Identity
from jaxsparse.specs import FeatureSpec, TableSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidentTable(TableSpec):
    """The places of a stored table; behind them, where its keys may lack a row, the default row.

    ``vocabulary_size`` counts all of them.
    """

    origin: TableSpec
    """The table as it was declared."""

    @property
    def device_rows(self) -> int:
        """Places for rows of keys."""
        return device_rows(self.origin)

    @property
    def default_row(self) -> int | None:
        """Place of the row that keys without one of their own read; None where each has one."""
        return self.device_rows if self.vocabulary_size > self.device_rows else None

    @property
    def is_default_fixed(self) -> bool:
        """Whether the default row never moves."""
        keys = self.origin.keys
        admission = keys.admission if isinstance(keys, Dynamic) else None
        return admission is not None and admission.default_row == "fixed"


def most_rows(table: TableSpec) -> int:
    """Rows a stored table can have, over all tiers."""
    return table.keys.capacity if isinstance(table.keys, Dynamic) else table.vocabulary_size


def device_rows(table: TableSpec) -> int:
    """Rows of a stored table that can be on the devices."""
    most = most_rows(table)
    return most if table.tiers is None else min(table.tiers.device_rows, most)


def resident_table(table: TableSpec) -> TableSpec:
    """The form the devices see; a table that is not stored as it is.

    >>> spec = TableSpec("t", embedding_dim=4, keys=Dynamic(100))
    >>> resident_table(spec).vocabulary_size
    100
    """
    if not table.is_stored:
        return table
    fields = {
        field.name: getattr(table, field.name)
        for field in dataclasses.fields(TableSpec)
        if field.init
    }
    has_default = isinstance(table.keys, Dynamic) and table.keys.admission is not None
    rows = device_rows(table) + has_default
    return ResidentTable(
        **{**fields, "vocabulary_size": rows, "keys": Identity(), "tiers": None}, origin=table
    )


def resident_feature(feature: FeatureSpec) -> FeatureSpec:
    """A feature of the resident form of its table."""
    return dataclasses.replace(feature, table=resident_table(feature.table))
