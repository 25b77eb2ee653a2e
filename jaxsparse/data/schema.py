# SPDX-License-Identifier: Apache-2.0
"""Which columns of a file are what: the ``[data.columns]`` part of a run's TOML.

::

    [data.columns]
    label = "click"
    dense = ["age", "price"]

    [data.columns.features]
    item = "item_id"                                    # feature = "column": an integer a cell
    city = { type = "string" }                          # the column is named as the feature
    clicked = { column = "history", separator = "|" }   # CSV cells such as 12|7|3
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal, get_args

KeyType = Literal["integer", "string"]
LabelKind = Literal["binary", "any"]


class DataError(ValueError):
    """Data that cannot be used; the text says in which file, where, and why."""


_SEVERAL = re.compile(r"-?[0-9]+(?:([|;, /:])-?[0-9]+)+")


def hint_at_keys(text: str) -> str:
    """What to do about text where an integer was expected.

    >>> hint_at_keys("3|17"), hint_at_keys("ann")
    ('several keys in a cell need separator = "|"', 'strings need type = "string"')
    """
    if not text:
        return "empty cells need missing = a key, or separator where cells hold several"
    several = _SEVERAL.fullmatch(text)
    if several:
        return f'several keys in a cell need separator = "{several[1]}"'
    return 'strings need type = "string"'


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureColumn:
    """The column a feature's keys come from."""

    column: str | None = None
    """Name of the column; None is the name of the feature."""

    type: KeyType = "integer"
    """``integer``: 64 bits, signed or unsigned; or ``string``."""

    separator: str | None = None
    """What separates the keys of a cell of text; an empty cell is an empty bag. None: one key a
    cell. List columns of Parquet files are bags without it."""

    missing: int | str | None = None
    """Key of an empty cell (CSV) or a null (Parquet) in a column of single keys, of the column's
    type. None: they are errors, but for an empty cell of strings, which is the key ``""``."""

    limit: int | None = None
    """Integer keys must be in 0..limit - 1, as tables with identity keys demand it; None: any."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        if self.type not in get_args(KeyType):
            raise ValueError(f"type must be one of {get_args(KeyType)}, got {self.type!r}")
        if self.separator == "":
            raise ValueError("separator must not be empty; leave it out where a cell is one key")
        if self.limit is not None and (self.type != "integer" or self.limit < 1):
            raise ValueError(f"limit must be >= 1 and is for integers, got {self.limit!r}")
        self._check_missing()

    def _check_missing(self) -> None:
        if self.missing is None:
            return
        if self.separator is not None:
            raise ValueError("missing is for single keys; with separator an empty cell is no key")
        expected = int if self.type == "integer" else str
        if not isinstance(self.missing, expected) or isinstance(self.missing, bool):
            raise ValueError(f"missing must be a key of type {self.type}, got {self.missing!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnSchema:
    """Roles of the columns; columns that are not named are not read.

    >>> schema = ColumnSchema(label="click", features={"item": "item_id"})
    >>> schema.feature_columns()["item"].column
    'item_id'
    """

    label: str | None = "label"
    """Column of labels. None: there is none or it is not read, and every label of the batches is 0
    (`stream_files` alone does that, for predictions)."""

    label_kind: LabelKind = "binary"
    """``binary``: every label is 0 or 1, anything else is an error; ``any``: any finite number."""

    dense: tuple[str, ...] = ()
    """Columns of dense values, in the order the model gets them."""

    weight: str | None = None
    """Column of sample weights, >= 0."""

    features: dict[str, str | FeatureColumn] = dataclasses.field(default_factory=dict)
    """By feature: the name of its column, or a `FeatureColumn`."""

    delimiter: str = ","
    r"""Between the cells of a CSV line; ``"\t"`` for tabs."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        if self.label_kind not in get_args(LabelKind):
            raise ValueError(
                f"label_kind must be one of {get_args(LabelKind)}, got {self.label_kind!r}"
            )
        is_one = len(self.delimiter) == 1 and self.delimiter.isascii()
        if not is_one or self.delimiter in '"\n\r\0':
            raise ValueError(
                "delimiter must be one ASCII character other than a quote or an end of line, "
                f"got {self.delimiter!r}"
            )
        names = [*([] if self.label is None else [self.label]), *self.dense, *self.features]
        names += [] if self.weight is None else [self.weight]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name!r} is named twice among label, dense, weight and features")
        for name, column in self.feature_columns().items():
            if column.separator is not None and column.separator == self.delimiter:
                raise ValueError(
                    f"feature {name!r}: separator {column.separator!r} is also the delimiter "
                    "between cells"
                )

    def feature_columns(self) -> dict[str, FeatureColumn]:
        """By feature: its column, every default filled in."""
        columns = {}
        for name, given in self.features.items():
            column = FeatureColumn(column=given) if isinstance(given, str) else given
            columns[name] = dataclasses.replace(column, column=column.column or name)
        return columns

    def roles(self) -> dict[str, list[str]]:
        """Names of the columns read, by role: label, dense, weight, feature."""
        features = [str(column.column) for column in self.feature_columns().values()]
        return {
            "label": [] if self.label is None else [self.label],
            "dense": list(self.dense),
            "weight": [] if self.weight is None else [self.weight],
            "feature": list(dict.fromkeys(features)),
        }
