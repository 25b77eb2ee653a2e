# SPDX-License-Identifier: Apache-2.0
"""Parquet files, a row group or a part of one at a time.

Nothing is ever joined over row groups: dictionaries differ between them, and arrow's 32-bit
offsets of lists could not hold the children of a whole file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxsparse.data.bad_rows import BadRows, OnBadRow, check_on_bad_row
from jaxsparse.data.batch import Batch
from jaxsparse.data.blocks import BLOCK_ROWS, Block, FileIndex
from jaxsparse.data.schema import ColumnSchema, DataError
from jaxsparse.data.sources import Source, read_errors
from jaxsparse.data.table_problems import split_bad_rows
from jaxsparse.data.tables import require_all, table_batch


@dataclasses.dataclass(frozen=True)
class ParquetFormat:
    """The columns a schema names."""

    schema: ColumnSchema
    on_bad_row: OnBadRow = "error"
    block_rows: int = BLOCK_ROWS

    def __post_init__(self) -> None:
        """Validates the fields."""
        check_on_bad_row(self.on_bad_row)

    def index(self, source: Source) -> FileIndex:
        """Row counts out of the file's footer; all rows are read where bad ones are skipped."""
        bad = BadRows()
        reader = ParquetReader(self, source)
        try:
            runs = reader.runs()
            if self.on_bad_row == "skip":
                runs = [[reader.without_bad_rows(block, bad) for block in run] for run in runs]
        finally:
            reader.close()
        return FileIndex(runs, bad)

    def open(self, source: Source, index: FileIndex) -> ParquetReader:
        """Opens the file."""
        del index
        return ParquetReader(self, source)


class ParquetReader:
    """An open Parquet file."""

    def __init__(self, form: ParquetFormat, source: Source) -> None:
        """Reads the footer.

        Raises:
            DataError: the file is not a Parquet file, or lacks a column.
        """
        import pyarrow as pa
        from pyarrow import parquet

        self._form, self._source = form, source
        self._names = list(
            dict.fromkeys(name for names in form.schema.roles().values() for name in names)
        )
        handle = source.open()
        try:
            with read_errors(source):
                self._file = parquet.ParquetFile(handle)
            require_all(self._file.schema_arrow.names, form.schema)
        except (pa.ArrowInvalid, ValueError) as error:
            handle.close()
            if isinstance(error, DataError):
                raise
            raise DataError(f"{source.path}: {error}") from error
        self._handle = handle
        self._pieces: Iterator[Any] = iter(())
        self._waiting: Any = None  # rest of the last piece
        self._at = (-1, 0)  # row group, and row in it, that `_take` gives next

    def runs(self) -> list[list[Block]]:
        """Blocks of every row group that has rows."""
        runs, first = [], 0
        for group in range(self._file.num_row_groups):
            num_rows = self._file.metadata.row_group(group).num_rows
            starts = range(0, num_rows, self._form.block_rows)
            sizes = [min(self._form.block_rows, num_rows - start) for start in starts]
            run = [
                Block(size, start, size, first + start, group)
                for start, size in zip(starts, sizes, strict=True)
            ]
            runs += [run] if run else []
            first += num_rows
        return runs

    def without_bad_rows(self, block: Block, bad: BadRows) -> Block:
        """The block with the number of its good rows; counts the others."""
        batch = self._batch(self._table(block), block, bad)
        return dataclasses.replace(block, num_rows=batch.num_samples)

    def read(self, block: Block) -> Batch:
        """The good rows of a block."""
        batch = self._batch(self._table(block), block, BadRows())
        if batch.num_samples != block.num_rows:
            raise DataError(
                f"{self._source.path}: the file has changed since its rows were counted (row group "
                f"{block.group}: {batch.num_samples} rows, {block.num_rows} expected)"
            )
        return batch

    def close(self) -> None:
        """Closes the file."""
        self._pieces, self._waiting = iter(()), None
        self._file.close()
        self._handle.close()

    def _batch(self, table: Any, block: Block, bad: BadRows) -> Batch:
        schema = self._form.schema
        try:
            return table_batch(table, schema)
        except (TypeError, ValueError) as error:
            # Only now the bad rows are looked for: most blocks have none.
            good, problems = split_bad_rows(table, schema)
            for row, reason, text in problems:
                where = f"{self._source.path}, row {block.first_row + row}"
                bad.meet(self._form.on_bad_row, reason, f"{where}: {text}")
            if not problems:
                where = f"{self._source.path}, rows from {block.first_row} on"
                raise DataError(f"{where}: {error}") from error
            try:
                return table_batch(good, schema)
            except (TypeError, ValueError) as still:
                raise DataError(f"{self._source.path}: {still}") from still

    def _table(self, block: Block) -> Any:
        """The columns of a block's rows, good and bad."""
        import pyarrow as pa

        group, row = self._at
        if group != block.group or row > block.offset:
            self._pieces = self._file.iter_batches(
                self._form.block_rows,
                row_groups=[block.group],
                columns=self._names,
                # Of a remote file arrow's threads would hold Python's bytes: see `reader_of`.
                use_threads=self._source.is_local,
            )
            self._waiting, self._at = None, (block.group, 0)
        try:
            with read_errors(self._source):
                while self._at[1] < block.offset:
                    self._take(min(self._form.block_rows, block.offset - self._at[1]))
                return pa.Table.from_batches(self._take(block.size))
        except pa.ArrowInvalid as error:
            raise DataError(f"{self._source.path}: {error}") from error

    def _take(self, num_rows: int) -> list[Any]:
        """The next rows of the row group; arrow may give fewer at a time than it is asked for."""
        taken = []
        while num_rows:
            piece = self._waiting or next(self._pieces, None)
            group, row = self._at
            if piece is None:
                raise DataError(
                    f"{self._source.path}: row group {group} ends at row {row}, {num_rows} more "
                    "are missing"
                )
            self._waiting = piece.slice(num_rows) if piece.num_rows > num_rows else None
            taken.append(piece.slice(0, num_rows))
            num_rows -= taken[-1].num_rows
            self._at = (group, row + taken[-1].num_rows)
        return taken
