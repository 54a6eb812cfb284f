"""Arrow IPC files and streams, memory-mapped, one record batch at a time.

Knows the messages of one file; saved data sets are such streams, found by their directory elsewhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from .parquet import rows_per_batch
from .place import first_line, open_mapped
from .rows import InputError, InputFile, RowBatch, bad_row, bad_rows
from .schema import batch_without_views, conform_batch, null_batch, schema_without_views
from .text import repair_text

_FILE_MAGIC = b"ARROW1"


@dataclass(slots=True)
class ArrowReader:
    """An Arrow file whose batches were counted."""

    file: InputFile
    schema: pa.Schema
    num_rows: int
    replaced_surrogates: int = 0

    def read(self, start: int, stop: int, schema: pa.Schema) -> Iterator[RowBatch]:
        first = 0
        for batch in _record_batches(self.file):
            if first >= stop:
                return
            lower, upper = max(start - first, 0), min(stop - first, batch.num_rows)
            if lower < upper:
                yield from self._slices(batch.slice(lower, upper - lower), first + lower, schema)
            first += batch.num_rows

    def place(self, row: int) -> str:
        return f"row {row + 1}"

    def _slices(self, batch: pa.RecordBatch, start: int, schema: pa.Schema) -> Iterator[RowBatch]:
        projected = batch.select([name for name in schema.names if name in batch.schema.names])
        step = rows_per_batch(projected)
        for offset in range(0, batch.num_rows, step):
            yield self._row_batch(projected.slice(offset, step), start + offset, schema)

    def _row_batch(self, batch: pa.RecordBatch, start: int, schema: pa.Schema) -> RowBatch:
        try:
            plain = batch_without_views(batch)
            repaired, count = repair_text(plain) if plain.num_columns else (plain, 0)
        except pa.ArrowException as error:
            problem = bad_row(f"{self.file.name}: damaged: {first_line(error)}")
            return RowBatch(start, null_batch(batch.num_rows, schema), dict.fromkeys(range(batch.num_rows), problem))
        self.replaced_surrogates += count
        columns, misfits = conform_batch(repaired, schema)
        return RowBatch(start, columns, bad_rows(self, start, misfits))


def open_arrow(file: InputFile) -> ArrowReader:
    """Counts the rows of a file or stream. Raises InputError when it is damaged or cut short."""
    schema, num_rows = None, 0
    for batch in _record_batches(file, include_schema=True):
        schema = schema_without_views(batch.schema)
        num_rows += batch.num_rows
    return ArrowReader(file, schema, num_rows)


def _record_batches(file: InputFile, include_schema: bool = False) -> Iterator[pa.RecordBatch]:
    """The batches in order; with `include_schema` an empty one comes first, to tell the schema."""
    try:
        with open_mapped(file.path) as source:
            yield from _batches_of(source, include_schema)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file.name}: not a readable Arrow file: {first_line(error)}") from error


def _batches_of(source: pa.NativeFile, include_schema: bool) -> Iterator[pa.RecordBatch]:
    if source.read(len(_FILE_MAGIC)) == _FILE_MAGIC:
        reader = pa.ipc.open_file(source)
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        source.seek(0)
        reader = pa.ipc.open_stream(source)
        batches = iter(reader)
    if include_schema:
        yield null_batch(0, reader.schema)
    yield from batches
