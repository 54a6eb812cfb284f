"""JSON lines: one scan settles schema and row count, then rows are read block by block.

Knows one file as bytes. A line that cannot be a row keeps its position as an unreadable row; blank lines are no rows.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from .lines import Block, Line, is_compressed, offset_of, read_blocks
from .place import first_line
from .rows import InputError, InputFile, RowBatch, bad_row
from .schema import blank, record_batch
from .text import replace_surrogates
from .votes import MAX_LEVELS, UNFIT, Votes, as_floats, has_shape, is_exact, is_too_deep, without_nan

BLOCK_BYTES = 1 << 20
_BATCH_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Start:
    """Where a block begins: its place in the file, and the row that its first row is."""

    block: Block
    row: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A line that is no row for a reason, though columns of it can be told."""

    columns: dict[str, Any]
    reason: str


Parsed = dict[str, Any] | Refused | str  # a row, or why there is none


@dataclass(slots=True)
class JsonlReader:
    """A JSONL file after its scan; `contested` columns hold values that do not fit the settled type.

    Such a value makes its row unreadable, whichever columns are read, if its column is `relevant` (default: all are).
    """

    file: InputFile
    schema: pa.Schema = field(default_factory=lambda: pa.schema([]))
    num_rows: int = 0
    replaced_surrogates: int = 0
    contested: frozenset[str] = frozenset()
    relevant: frozenset[str] | None = None
    block_bytes: int = BLOCK_BYTES
    starts: list[Start] = field(default_factory=list)
    unfinished: Line | None = None  # at the end of the file, still being written
    end: int | None = None  # the byte at which that line begins
    parse: Callable[[Line], Parsed] = field(default_factory=lambda: parse)

    def read(self, start: int, stop: int, schema: pa.Schema) -> Iterator[RowBatch]:
        for first, lines in self._blocks(start):
            if first >= stop:
                return
            wanted = lines[max(start - first, 0) : stop - first]
            for offset in range(0, len(wanted), _BATCH_ROWS):
                part = wanted[offset : offset + _BATCH_ROWS]
                yield self._row_batch(part, max(first, start) + offset, schema)

    def place(self, row: int) -> str:
        first, lines = next(iter(self._blocks(row)))
        return f"line {lines[row - first].number}"

    def _blocks(self, row: int) -> Iterator[tuple[int, list[Line]]]:
        """Blocks from the one that holds `row` on, each with its first row."""
        if not self.starts:
            return
        begin = self.starts[bisect_right(self.starts, row, key=lambda start: start.row) - 1]
        first = begin.row
        for _, lines in read_blocks(self.file.path, self.block_bytes, begin.block):
            yield first, lines
            first += len(lines)

    def _row_batch(self, lines: list[Line], start: int, schema: pa.Schema) -> RowBatch:
        rows = [self.parse(line) for line in lines]
        problems = {at: row for at, row in enumerate(rows) if isinstance(row, str)}
        refused = {at: row for at, row in enumerate(rows) if isinstance(row, Refused)}
        problems.update({at: row.reason for at, row in refused.items()})
        values = [row if isinstance(row, dict) else row.columns if isinstance(row, Refused) else {} for row in rows]
        relevant = self.contested if self.relevant is None else self.contested & self.relevant
        extra = [self.schema.field(name) for name in sorted(relevant) if name not in schema.names]
        arrays = []
        for column in [*schema, *extra]:
            array, misfits = _column([row.get(column.name) for row in values], column, column.name in self.contested)
            arrays.append(array)
            problems.update({offset: message for offset, message in misfits.items() if offset not in problems})
        errors = {
            offset: bad_row(f"{self.file.name} line {lines[offset].number}: {problem}")
            for offset, problem in sorted(problems.items())
        }
        batch = record_batch(arrays[: len(schema)], schema, len(lines))
        return RowBatch(start, blank(batch, errors.keys() - refused.keys()), errors)


def open_jsonl(
    file: InputFile,
    num_rows: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    settled: pa.Schema | None = None,
    relevant: frozenset[str] | None = None,
    parse_line: Callable[[Line], Parsed] | None = None,
) -> JsonlReader:
    """Scans the file, or its first `num_rows` rows; types in `settled` stand, the others are decided.

    `parse_line` makes a row of a line, or says why it is none (default: any JSON object is a row); of a `Refused` line
    the columns that it tells are kept beside the error.

    Raises InputError when it cannot be read at all.
    """
    reader = JsonlReader(file, block_bytes=block_bytes, relevant=relevant, parse=parse_line or parse)
    votes = Votes(settled)
    try:
        for block, lines in read_blocks(file.path, block_bytes):
            lines = _finished(reader, block, lines)
            lines = lines if num_rows is None else lines[: num_rows - reader.num_rows]
            _scan_block(reader, votes, block, lines)
            if reader.num_rows == num_rows:
                break
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{file.name}: cannot be read: {first_line(error)}") from error
    reader.schema, reader.contested = votes.result()
    return reader


def _finished(reader: JsonlReader, block: Block, lines: list[Line]) -> list[Line]:
    """The lines without one at the end of the file that is not whole yet: it is no row until it is."""
    if lines[-1].ended or not str(parse(lines[-1])).startswith("not valid"):
        return lines
    reader.unfinished = lines[-1]
    reader.end = None if is_compressed(reader.file.path) else offset_of(reader.file.path, lines[-1], block)
    return lines[:-1]


def parse(line: Line) -> dict[str, Any] | str:
    """The object on a line, or why there is none."""
    try:
        value = json.loads(line.data.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"not valid UTF-8 at byte {error.start + 1}"
    except json.JSONDecodeError as error:
        return f"not valid JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return f"not readable JSON: {first_line(error)}"
    if not isinstance(value, dict):
        return f"not a JSON object but {_kind(value)}"
    return replace_surrogates(value)[0] if _may_hold_surrogates(line.data) else value


def first_problem(file: InputFile) -> str | None:
    """What is wrong with the first line, and its likely cause; None when it is a row or there is none."""
    lines = (line for _, lines in read_blocks(file.path, BLOCK_BYTES) for line in lines)
    line = next(lines, None)
    problem = None if line is None else parse(line)
    if line is None or not isinstance(problem, str):
        return None
    return f"{file.name} line {line.number}: {problem}{_likely_cause(line.data)}"


def _likely_cause(data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data:
        return "; the file looks like UTF-16, save it as UTF-8"
    if b"\r" in data.strip():
        return "; its lines end with a carriage return alone, end them with a line feed"
    return "; write one JSON object per line"


def _may_hold_surrogates(data: bytes) -> bool:
    return b"\\ud" in data or b"\\uD" in data


def _scan_block(reader: JsonlReader, votes: Votes, block: Block, lines: list[Line]) -> None:
    if lines and reader.num_rows == 0 and lines[0].data.lstrip().startswith(b"["):
        _refuse_array(reader.file, lines[0])
    reader.starts.append(Start(block, reader.num_rows))
    reader.num_rows += len(lines)
    rows = [row for row in map(reader.parse, lines) if isinstance(row, dict)]
    for line in lines:
        if _may_hold_surrogates(line.data):
            reader.replaced_surrogates += _count_surrogates(line)
    votes.add(rows)


def _count_surrogates(line: Line) -> int:
    try:
        return replace_surrogates(json.loads(line.data))[1]
    except (ValueError, RecursionError):
        return 0


def _refuse_array(file: InputFile, line: Line) -> None:
    if line.data.strip() == b"[" or line.data.lstrip().startswith(b"[{"):
        raise InputError(f"{file.name}: is one JSON array; write one object per line", 2)


def _column(values: list[Any], column: pa.Field, contested: bool) -> tuple[pa.Array, dict[int, str]]:
    """The values of a column, nulls where they do not fit; what does not fit, by offset."""
    if not pa.types.is_floating(column.type) and any(type(value) is float for value in values):
        values = without_nan(values)
    unshaped = [at for at, value in enumerate(values) if not _is_shaped(value, column.type)] if contested else []
    misfits = {at: _message(values[at], column) for at in unshaped}
    kept = [None if at in misfits else value for at, value in enumerate(values)]
    try:
        return pa.array(kept, column.type), misfits
    except UNFIT:
        kept = [as_floats(value, column.type) for value in kept]
        misfits.update({at: _message(value, column) for at, value in enumerate(kept) if not _converts(value, column)})
    return pa.array([None if at in misfits else value for at, value in enumerate(kept)], column.type), misfits


def _is_shaped(value: Any, kind: pa.DataType) -> bool:
    return not is_too_deep(value) and has_shape(value, kind)


def _converts(value: Any, column: pa.Field) -> bool:
    try:
        pa.array([value], column.type)
        return True
    except UNFIT:
        return False


def _message(value: Any, column: pa.Field) -> str:
    if is_too_deep(value):
        return f"column {column.name!r} is nested deeper than {MAX_LEVELS} levels"
    if pa.types.is_floating(column.type) and type(value) is int and not is_exact(value):
        return f"column {column.name!r} is {column.type}, which cannot hold {str(value)[:80]} exactly"
    return f"column {column.name!r} is {column.type}, here {_kind(value)}: {json.dumps(value)[:80]}"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
