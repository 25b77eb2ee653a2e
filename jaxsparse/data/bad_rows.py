# SPDX-License-Identifier: Apache-2.0
"""Rows that cannot be used: counted by reason, with the first of each in full."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, Literal, get_args

from jaxsparse.data.schema import DataError

OnBadRow = Literal["error", "skip"]
"""``error`` raises at the first bad row; ``skip`` leaves bad rows out and counts them."""


def check_on_bad_row(policy: str) -> None:
    """Raises ValueError unless ``policy`` is one of `OnBadRow`."""
    if policy not in get_args(OnBadRow):
        raise ValueError(f"on_bad_row must be one of {get_args(OnBadRow)}, got {policy!r}")


@dataclasses.dataclass
class BadRows:
    """What was left out.

    >>> bad = BadRows()
    >>> bad.add("number of columns", "a.tsv, line 7: expected 40 columns, got 39")
    >>> bad.total
    1
    """

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    """Rows by reason."""

    examples: dict[str, str] = dataclasses.field(default_factory=dict)
    """By reason: file, line, column and value of the first such row."""

    @property
    def total(self) -> int:
        """Rows left out."""
        return self.counts.total()

    def add(self, reason: str, text: str, count: int = 1) -> None:
        """Counts rows; ``text`` tells of the first."""
        self.counts[reason] += count
        self.examples.setdefault(reason, text)

    def merge(self, other: BadRows) -> None:
        """Adds what ``other`` counted, as later rows."""
        self.counts.update(other.counts)
        self.examples = {**other.examples, **self.examples}

    def meet(self, policy: OnBadRow, reason: str, text: str) -> None:
        """Deals with one bad row as the policy says.

        Raises:
            DataError: the policy is ``error``.
        """
        if policy == "error":
            raise DataError(text)
        self.add(reason, text)

    def report(self) -> dict[str, Any]:
        """``{reason: {"rows": count, "example": text}}``, the most frequent reason first."""
        return {
            reason: {"rows": count, "example": self.examples[reason]}
            for reason, count in self.counts.most_common()
        }
