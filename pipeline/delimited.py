"""CSV and TSV: one scan settles types and row count, then rows are read block by block.

Knows one file with a header. A record that cannot be a row keeps its position as an unreadable row.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce

import pyarrow as pa

from .jsonl import BLOCK_BYTES, Start
from .lines import Line
from .place import first_line
from .records import Dialect, read_records
from .rows import InputError, InputFile, RowBatch, bad_row
from .schema import blank, conform_batch, fits, record_batch

_BATCH_ROWS = 4096
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|-?inf|nan", re.IGNORECASE)
_BARE_RETURN = re.compile(r"\r(?!\n)")
_TRUTH = ("true", "false")
_TAB, _COMMA = Dialect(b"\t"), Dialect(b",")

Record = dict[str, str | None]


@dataclass(slots=True)
class DelimitedReader:
    """A file after its scan. An empty field without quotes is null; a column is the narrowest type of all its values.

    A value that does not fit a type settled earlier makes its row unreadable, if its column is `relevant`.
    """

    file: InputFile
    header: list[str] = field(default_factory=list)
    schema: pa.Schema = field(default_factory=lambda: pa.schema([]))
    num_rows: int = 0
    relevant: frozenset[str] | None = None
    contested: frozenset[str] = frozenset()
    block_bytes: int = BLOCK_BYTES
    starts: list[Start] = field(default_factory=list)
    replaced_surrogates: int = 0

    @property
    def dialect(self) -> Dialect:
        return _TAB if ".tsv" in self.file.path.name.lower() else _COMMA

    def read(self, start: int, stop: int, schema: pa.Schema) -> Iterator[RowBatch]:
        for first, records in self._blocks(start):
            if first >= stop:
                return
            wanted = records[max(start - first, 0) : stop - first]
            for offset in range(0, len(wanted), _BATCH_ROWS):
                yield self._row_batch(wanted[offset : offset + _BATCH_ROWS], max(first, start) + offset, schema)

    def place(self, row: int) -> str:
        first, records = next(iter(self._blocks(row)))
        return f"line {records[row - first].number}"

    def parse(self, line: Line) -> Record | str:
        """The fields of a record by column, or why there are none."""
        fields = _fields(line.data, self.dialect)
        if isinstance(fields, str):
            return fields
        if len(fields) != len(self.header):
            return f"{len(fields)} fields, the header has {len(self.header)}"
        return dict(zip(self.header, fields, strict=True))

    def _blocks(self, row: int) -> Iterator[tuple[int, list[Line]]]:
        """Blocks from the one that holds `row` on, each with its first row."""
        if not self.starts:
            return
        at = bisect_right(self.starts, row, key=lambda start: start.row) - 1
        first = self.starts[at].row
        for index, (_, lines) in enumerate(
            read_records(self.file.path, self.dialect, self.block_bytes, self.starts[at].block)
        ):
            records = lines[1:] if at + index == 0 else lines
            yield first, records
            first += len(records)

    def _row_batch(self, records: list[Line], start: int, schema: pa.Schema) -> RowBatch:
        rows = [self.parse(record) for record in records]
        problems = {offset: row for offset, row in enumerate(rows) if isinstance(row, str)}
        values: list[Record] = [{} if isinstance(row, str) else row for row in rows]
        relevant = self.contested if self.relevant is None else self.contested & self.relevant
        wanted = pa.schema(
            [*schema, *(self.schema.field(name) for name in sorted(relevant) if name not in schema.names)]
        )
        batch, misfits = conform_batch(_texts(values, wanted), wanted)
        problems = {**misfits, **problems}
        errors = {
            at: bad_row(f"{self.file.name} line {records[at].number}: {problem}")
            for at, problem in sorted(problems.items())
        }
        columns = record_batch(batch.columns[: len(schema)], schema, len(rows))
        return RowBatch(start, blank(columns, errors), errors)


def open_delimited(
    file: InputFile,
    num_rows: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    settled: pa.Schema | None = None,
    relevant: frozenset[str] | None = None,
) -> DelimitedReader:
    """Scans the file, or its first `num_rows` rows; types in `settled` stand. Raises InputError without a header."""
    reader = DelimitedReader(file, block_bytes=block_bytes, relevant=relevant)
    kinds: dict[str, pa.DataType] = {}
    try:
        for block, lines in read_records(file.path, reader.dialect, block_bytes):
            if not reader.starts:
                reader.header = _header(reader, lines[0])
                kinds = dict.fromkeys(reader.header, pa.null())
            records = lines if reader.starts else lines[1:]
            records = records if num_rows is None else records[: num_rows - reader.num_rows]
            reader.starts.append(Start(block, reader.num_rows))
            reader.num_rows += len(records)
            _widen(kinds, [row for record in records if isinstance(row := reader.parse(record), dict)])
            if reader.num_rows == num_rows:
                break
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{file.name}: cannot be read: {first_line(error)}") from error
    known = {column.name: column.type for column in settled or ()}
    types = {name: _settle(kind, known.get(name)) for name, kind in kinds.items()}
    reader.schema = pa.schema([(name, types[name]) for name in reader.header])
    reader.contested = frozenset(name for name, kind in kinds.items() if not fits(kind, types[name]))
    return reader


def unify(readers: Sequence[DelimitedReader], settled: pa.Schema | None) -> None:
    """Gives columns of the same name one type over all files, unless it is settled."""
    known = frozenset(() if settled is None else settled.names)
    kinds: dict[str, pa.DataType] = {}
    for reader in readers:
        for column in reader.schema:
            kinds[column.name] = _wider(kinds.get(column.name, pa.null()), column.type)
    for reader in readers:
        fields = [column if column.name in known else column.with_type(kinds[column.name]) for column in reader.schema]
        reader.schema = pa.schema(fields)


def _texts(values: list[Record], schema: pa.Schema) -> pa.RecordBatch:
    kinds = [pa.null() if pa.types.is_null(column.type) else pa.large_string() for column in schema]
    columns = [
        pa.array([row.get(name) for row in values], kind) for name, kind in zip(schema.names, kinds, strict=True)
    ]
    return record_batch(columns, pa.schema(list(zip(schema.names, kinds, strict=True))), len(values))


def _header(reader: DelimitedReader, line: Line) -> list[str]:
    fields = _fields(line.data, reader.dialect)
    if isinstance(fields, str):
        raise InputError(f"{reader.file.name} line {line.number}: the header cannot be read: {fields}", 2)
    names = [name or "" for name in fields]
    if any(_BARE_RETURN.search(name) for name in names):
        problem = "the header holds a carriage return without a line feed"
        raise InputError(f"{reader.file.name} line {line.number}: {problem}; end every line with a line feed", 2)
    if "" in names:
        raise InputError(f"{reader.file.name}: column {names.index('') + 1} of the header has no name, give it one", 2)
    return names


def _fields(data: bytes, dialect: Dialect) -> list[str | None] | str:
    whole = dialect.record.match(data)
    if whole is None or whole.end() != len(data):
        return f"a quoted field is not closed, or goes on behind its quotes, at byte {whole.end() + 1 if whole else 1}"
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"not valid UTF-8 at byte {error.start + 1}"
    return [_content(match) for match in dialect.field.finditer(text)]


def _content(match: re.Match[str]) -> str | None:
    quoted = match[1]
    return (match[2] or None) if quoted is None else quoted.replace('""', '"')


def _widen(kinds: dict[str, pa.DataType], rows: list[Record]) -> None:
    for name, kind in kinds.items():
        if not pa.types.is_string(kind):
            kinds[name] = reduce(_wider, {_kind(row[name]) for row in rows}, kind)


def _kind(text: str | None) -> pa.DataType:
    """The narrowest type of one value. Numbers with leading zeros or beyond 18 digits are text: they are codes."""
    if text is None:
        return pa.null()
    if _WHOLE.fullmatch(text):
        return pa.int64()
    if _DECIMAL.fullmatch(text) and len(text) <= 18:
        return pa.float64()
    return pa.bool_() if text.lower() in _TRUTH else pa.string()


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The type that holds what both hold."""
    if pa.types.is_null(one) or one.equals(other):
        return other
    if pa.types.is_null(other):
        return one
    return pa.float64() if {one, other} == {pa.int64(), pa.float64()} else pa.string()


def _settle(kind: pa.DataType, known: pa.DataType | None) -> pa.DataType:
    return kind if known is None or pa.types.is_null(known) else known
