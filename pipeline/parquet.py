"""Parquet files, one row group at a time; a damaged row group is as many unreadable rows.

Knows the footer and the row groups of one file; positions over several files are not known here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from .place import first_line, parquet_source
from .rows import InputError, InputFile, RowBatch, bad_row, bad_rows
from .schema import batch_without_views, conform_batch, null_batch, schema_without_views
from .text import repair_text

_BATCH_BYTES = 16 << 20
_BATCH_ROWS = 4096


@dataclass(slots=True)
class ParquetReader:
    """A Parquet file whose footer was read."""

    file: InputFile
    schema: pa.Schema
    group_rows: list[int]
    replaced_surrogates: int = 0

    @property
    def num_rows(self) -> int:
        return sum(self.group_rows)

    def read(self, start: int, stop: int, schema: pa.Schema) -> Iterator[RowBatch]:
        first = 0
        with _open(self.file) as source:
            for group, num_rows in enumerate(self.group_rows):
                if first < stop and first + num_rows > start:
                    lower, upper = max(start - first, 0), min(stop - first, num_rows)
                    yield from self._read_group(source, group, first, (lower, upper), schema)
                first += num_rows

    def place(self, row: int) -> str:
        return f"row {row + 1}"

    def _read_group(
        self, source: pq.ParquetFile, group: int, first: int, part: tuple[int, int], schema: pa.Schema
    ) -> Iterator[RowBatch]:
        lower, upper = part
        try:
            table = self._decode_group(source, group, schema).slice(lower, upper - lower)
        except (pa.ArrowException, OSError) as error:
            yield from self._damaged(group, (first + lower, first + upper), schema, error)
            return
        position = first + lower
        for batch in table.to_batches(max_chunksize=rows_per_batch(table)) if len(schema) else _bare(table):
            columns, misfits = conform_batch(batch, schema)
            yield RowBatch(position, columns, bad_rows(self, position, misfits))
            position += batch.num_rows

    def _decode_group(self, source: pq.ParquetFile, group: int, schema: pa.Schema) -> pa.Table:
        names = [name for name in schema.names if name in self.schema.names]
        if not names:
            return null_table(self.group_rows[group])
        table = source.read_row_group(group, columns=names)
        if table.num_rows != self.group_rows[group]:
            raise pa.ArrowInvalid(f"{table.num_rows} rows instead of {self.group_rows[group]}")
        repaired = [repair_text(batch_without_views(batch)) for batch in table.to_batches()]
        self.replaced_surrogates += sum(count for _, count in repaired)
        return pa.Table.from_batches([batch for batch, _ in repaired], schema=schema_without_views(table.schema))

    def _damaged(self, group: int, rows: tuple[int, int], schema: pa.Schema, error: Exception) -> Iterator[RowBatch]:
        message = f"{self.file.name}: row group {group} is damaged: {first_line(error)}"
        for start in range(rows[0], rows[1], _BATCH_ROWS):
            num_rows = min(_BATCH_ROWS, rows[1] - start)
            errors = {offset: bad_row(message) for offset in range(num_rows)}
            yield RowBatch(start, null_batch(num_rows, schema), errors)


def open_parquet(file: InputFile) -> ParquetReader:
    """Reads the footer. Raises InputError when there is none that can be read."""
    with _open(file) as source:
        metadata = source.metadata
        groups = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        return ParquetReader(file, schema_without_views(source.schema_arrow), groups)


def rows_per_batch(table: pa.Table | pa.RecordBatch) -> int:
    """How many of these rows make a batch of moderate size."""
    row_bytes = max(1, int(table.nbytes) // max(1, int(table.num_rows)))
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes))


def null_table(num_rows: int) -> pa.Table:
    """A table of rows without columns."""
    return pa.table({"": pa.nulls(num_rows)}).select([])


def _bare(table: pa.Table) -> Iterator[pa.RecordBatch]:
    for start in range(0, table.num_rows, _BATCH_ROWS):
        yield null_batch(min(_BATCH_ROWS, table.num_rows - start), pa.schema([]))


def _open(file: InputFile) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(parquet_source(file.path), buffer_size=1 << 20, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file.name}: not a readable Parquet file: {first_line(error)}") from error
