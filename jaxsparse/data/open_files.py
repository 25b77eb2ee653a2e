# SPDX-License-Identifier: Apache-2.0
"""Streaming datasets of files by their kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxsparse.data.bad_rows import OnBadRow
from jaxsparse.data.blocks import Format
from jaxsparse.data.criteo import Categories, CriteoParser
from jaxsparse.data.csv_blocks import CsvParser
from jaxsparse.data.parquet_blocks import ParquetFormat
from jaxsparse.data.schema import ColumnSchema, DataError
from jaxsparse.data.sources import Paths, Source, find_sources
from jaxsparse.data.stream import StreamDataset
from jaxsparse.data.text_blocks import TextFormat


def stream_files(
    paths: Paths,
    schema: ColumnSchema,
    batch_size: int,
    *,
    on_bad_row: OnBadRow = "error",
    **options: Any,
) -> StreamDataset:
    """A dataset of CSV (plain or gzipped) and Parquet files of any size, read as it goes.

    Args:
        paths: paths, globs or URLs of ``.csv``, ``.csv.gz``, ``.tsv``, ``.tsv.gz``, ``.parquet``.
            CSV files have a header.
        schema: which columns are what.
        batch_size: rows in a batch of the whole job, a multiple of ``process_count``.
        on_bad_row: ``"error"`` raises at the first row that cannot be used, ``"skip"`` leaves such
            rows out: see `StreamDataset.bad_rows`. A broken file is an error in any case.
        **options: of `StreamDataset`: ``shuffle`` (every epoch in an order of its own, drawn from
            seed and epoch), ``seed``, ``shuffle_rows`` (the window in which rows are mixed; blocks
            come in any order before, so row groups should be no longer), ``num_lanes``
            (see `jaxsparse.data.order`), ``drop_last``, ``process_index`` and ``process_count``.

    Raises:
        DataError: a file is missing, of an unknown kind, empty or broken, or a column is missing.
    """
    table = ParquetFormat(schema, on_bad_row)
    text = TextFormat(CsvParser(schema, on_bad_row))

    def kind(source: Source) -> Format:
        name = source.name.lower()
        if name.endswith(".parquet"):
            return table
        if name.removesuffix(".gz").endswith((".csv", ".tsv")):
            return text
        raise DataError(
            f"{source.path}: unknown kind of file; known are .csv, .csv.gz, .tsv, .tsv.gz and "
            ".parquet"
        )

    return _dataset(paths, kind, batch_size, options)


def stream_criteo(
    paths: Paths,
    batch_size: int,
    *,
    categories: Categories = "hex",
    header: bool = False,
    on_bad_row: OnBadRow = "error",
    **options: Any,
) -> StreamDataset:
    """A dataset of files in Criteo's format, plain or gzipped (``.gz``), whatever their names.

    Features are C1..C26, dense values ``log(1 + max(I, 0))`` of I1..I13; `jaxsparse.data.criteo`
    says what missing values become.

    Args:
        paths: paths, globs or URLs.
        batch_size: rows in a batch of the whole job, a multiple of ``process_count``.
        categories: ``"hex"``: keys are the numbers; ``"string"``: the text.
        header: whether each file begins with a line to be left out.
        on_bad_row: as `stream_files`.
        **options: as `stream_files`.
    """
    parser = CriteoParser(categories=categories, has_header=header, on_bad_row=on_bad_row)
    text = TextFormat(parser)
    return _dataset(paths, lambda _: text, batch_size, options)


def _dataset(
    paths: Paths, kind: Callable[[Source], Format], batch_size: int, options: dict[str, Any]
) -> StreamDataset:
    sources = find_sources(paths)
    return StreamDataset([(source, kind(source)) for source in sources], batch_size, **options)
