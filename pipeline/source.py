"""All rows of a job's input as one sequence of positions over its files.

Knows the order of files and the positions of their rows; how a format is read is in the module of the format.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from .arrow import open_arrow
from .config import InputSettings
from .delimited import DelimitedReader, open_delimited, unify
from .files import find_files
from .growth import Run, arrange
from .jsonl import JsonlReader, first_problem, open_jsonl
from .openai_lines import open_requests
from .parquet import open_parquet
from .rows import FileIdentity, FileReader, InputError, InputFile, RowBatch, Source
from .schema import extend_fields, merge_fields, nullable
from .unique import repeated_rows

__all__ = ["FileIdentity", "InputError", "RowBatch", "Source", "open_source", "sample_schema"]

_SAMPLE_FILES = 64
_SAMPLE_ROWS = 1000
_METADATA = b"huggingface"


def open_source(
    settings: InputSettings,
    base: Path,
    known: Sequence[FileIdentity] = (),
    known_schema: pa.Schema | None = None,
    relevant: frozenset[str] | None = None,
) -> Source:
    """The input of a job; `base` is what relative paths refer to.

    `known` and `known_schema` are `Source.files` and `Source.schema` of an earlier run: its rows keep their positions
    and its columns their types, rows added since come after them, and those that do not fit are unreadable. JSONL
    files are read once to settle their schema. `relevant` are the columns that prompts use or the output carries
    (default: all); a value of another column is never what is wrong with a row. Raises InputError: damaged or
    contradicting files, known files that are gone or changed, a missing or repeated `input.id`.
    """
    if relevant is not None and settings.id_column is not None:
        relevant |= {settings.id_column}
    readers = {
        file.name: _open(file, _rows_needed(settings.limit, file, known), known_schema, relevant)
        for file in find_files(settings, base, known)
    }
    unify([reader for reader in readers.values() if isinstance(reader, DelimitedReader)], known_schema)
    source = FileSource(arrange(readers, known), _merge_schemas(list(readers.values()), known_schema), settings.limit)
    if settings.id_column is not None:
        _require_column(source.schema, settings, base)
        at_once = settings.format == "openai"  # a request that comes twice is a mistake whenever it comes
        delivery = (lambda position: 0) if at_once else source.delivery
        source = replace(source, repeated=repeated_rows(source, settings.id_column, delivery))
    return source


def sample_schema(settings: InputSettings, base: Path, known_schema: pa.Schema | None = None) -> pa.Schema:
    """The columns as far as footers and the first lines tell; quick, for `check`. Raises InputError."""
    readers = [_open(file, _SAMPLE_ROWS, known_schema) for file in find_files(settings, base)[:_SAMPLE_FILES]]
    unify([reader for reader in readers if isinstance(reader, DelimitedReader)], known_schema)
    schema = _merge_schemas(readers, known_schema)
    if settings.id_column is not None:
        _require_column(schema, settings, base)
    return schema


def why_no_columns(settings: InputSettings, base: Path) -> str:
    """Why an input without a single column has none: the first line that cannot be read, or that there is no row."""
    files = find_files(settings, base)
    problems = (first_problem(file) for file in files if file.format == "jsonl")
    names = ", ".join(file.name for file in files[:3])
    return next((problem for problem in problems if problem), f"{names}: the input has no rows and no columns")


@dataclass(frozen=True)
class FileSource:
    """Runs of rows of files, one after another."""

    runs: list[Run]
    schema: pa.Schema
    limit: int | None
    repeated: Sequence[int] = ()

    @cached_property
    def num_rows(self) -> int:
        total = sum(run.identity.rows for run in self.runs)
        return total if self.limit is None else min(total, self.limit)

    @cached_property
    def files(self) -> list[FileIdentity]:
        return [run.identity for run in self.runs if run.start < self.num_rows or run.identity.rows == 0]

    @property
    def replaced_surrogates(self) -> int:
        return sum(reader.replaced_surrogates for reader in {id(run.reader): run.reader for run in self.runs}.values())

    @property
    def unfinished(self) -> list[str]:
        readers = {id(run.reader): run.reader for run in self.runs}.values()
        lines = [(reader.file.name, reader.unfinished) for reader in readers if isinstance(reader, JsonlReader)]
        return [f"{name} line {line.number}" for name, line in lines if line is not None]

    def batches(self, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[RowBatch]:
        schema = self.schema if columns is None else _project(self.schema, columns)
        for run in self.runs:
            stop = min(run.start + run.identity.rows, self.num_rows)
            lower = max(start, run.start)
            if lower < stop:
                yield from _read_run(run, lower, stop, schema)

    def delivery(self, position: int) -> int:
        """To which run of the job, counted from 0, the row was new."""
        return self._run_of(position).identity.delivery

    def _run_of(self, position: int) -> Run:
        return self.runs[bisect_right(self.runs, position, key=lambda run: run.start) - 1]

    def place(self, position: int) -> str:
        run = self._run_of(position)
        return f"{run.reader.file.name} {run.reader.place(position - run.start + run.first_row)}"


def _read_run(run: Run, start: int, stop: int, schema: pa.Schema) -> Iterator[RowBatch]:
    shift = run.start - run.first_row
    batches = run.reader.read(start - shift, stop - shift, schema)
    # no loop: its variable would keep the row group of the last batch while the next one is read
    return map(lambda batch: RowBatch(batch.start + shift, batch.columns, batch.errors), batches)  # noqa: C417


def _open(
    file: InputFile, num_rows: int | None, settled: pa.Schema | None, relevant: frozenset[str] | None = None
) -> FileReader:
    if not file.path.exists():
        raise InputError(f"{file.name}: does not exist")
    if file.format == "parquet":
        reader: FileReader = open_parquet(file)
    elif file.format == "arrow":
        reader = open_arrow(file)
    elif file.format == "openai":
        reader = open_requests(file, num_rows)
    elif file.format == "csv":
        reader = open_delimited(file, num_rows, settled=settled, relevant=relevant)
    else:
        reader = open_jsonl(file, num_rows, settled=settled, relevant=relevant)
    repeated = {name for name in reader.schema.names if reader.schema.names.count(name) > 1}
    if repeated:
        raise InputError(f"{file.name}: holds the column {min(repeated)!r} twice, rename one")
    return reader


def _rows_needed(limit: int | None, file: InputFile, known: Sequence[FileIdentity]) -> int | None:
    """A row of a file never comes before its place in the file, so no file has to be read beyond the limit."""
    return None if limit is None else max(limit, sum(entry.rows for entry in known if entry.path == file.name))


def _merge_schemas(readers: list[FileReader], settled: pa.Schema | None) -> pa.Schema:
    """The columns of all files. Settled types only gain what was not known of them; the others hold every value."""
    merged: pa.Schema = pa.schema([]) if settled is None else settled
    fixed = frozenset(merged.names)
    for reader in readers:
        fields = merge_fields(merged, reader.schema)
        if isinstance(fields, pa.Field):
            known = merged.field(fields.name).type
            raise InputError(
                f"{reader.file.name}: column {fields.name!r} is {fields.type}, but {known} in files before it"
            )
        extended = {field.name: field for field in extend_fields(merged, reader.schema)}
        fields = [extended[field.name] if field.name in fixed else field for field in fields]
        kept = {_METADATA: metadata[_METADATA]} if _METADATA in (metadata := _metadata(merged, reader)) else None
        merged = pa.schema(fields, kept)
    return nullable(merged)


def _metadata(merged: pa.Schema, reader: FileReader) -> dict[bytes, bytes]:
    """Features of a data set, as saved with the first file that has them."""
    return {**(reader.schema.metadata or {}), **(merged.metadata or {})}


def _project(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    return pa.schema([schema.field(name) for name in dict.fromkeys(columns)], schema.metadata)


def _require_column(schema: pa.Schema, settings: InputSettings, base: Path) -> None:
    if not schema.names:
        raise InputError(why_no_columns(settings, base), 2)
    if settings.id_column not in schema.names:
        raise InputError(f"input.id: the input has no column {settings.id_column!r}, only {', '.join(schema.names)}", 2)
