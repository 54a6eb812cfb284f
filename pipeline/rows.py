"""The nouns of reading: a file's identity, a batch of rows, the error that ends reading.

Knows positions and Arrow record batches; opens no file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import pyarrow as pa

from batchgen.engine.request import RowError, Sampling

from .place import AnyPath


class InputError(Exception):
    """The input cannot be read as asked: one line naming the file, line or column, and the cure.

    `exit_code` is 2 when the job file or the data contradicts the job, 1 when a file is damaged.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


Format = Literal["parquet", "jsonl", "arrow", "csv", "openai"]


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file to read; `name` is how messages and the manifest call it: relative to the job file where possible."""

    path: AnyPath
    name: str
    format: Format


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A run of rows of one file, as recorded in the manifest; their positions follow those of the run before.

    A file that grew stands in the list once more, with the rows added since. `size` and `mtime_ns` are the file's
    when these rows were counted, and `version` its etag where a store gives one; `edge` is a digest of the bytes
    around its end then, by which growth is told from change. `delivery` counts the runs of the job that found rows:
    it is the number of the one to which these were new.
    """

    path: str
    size: int
    mtime_ns: int
    rows: int
    edge: str = ""
    version: str = ""
    delivery: int = 0


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Consecutive rows from position `start` on; `errors` holds those that could not be read, by offset."""

    start: int
    columns: pa.RecordBatch
    errors: Mapping[int, RowError] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return int(self.columns.num_rows)

    def slice(self, offset: int, num_rows: int) -> "RowBatch":
        """At most `num_rows` rows from `offset` on."""
        errors = {at - offset: error for at, error in self.errors.items() if offset <= at < offset + num_rows}
        return RowBatch(self.start + offset, self.columns.slice(offset, num_rows), errors)


@dataclass(frozen=True, slots=True)
class RowTag:
    """What a request carries through the engine: whose it is, and how its text is to be cut."""

    position: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that a policy left out (`on_null` or `on_too_long`): it has no answer and no error."""

    position: int
    reason: str
    policy: str


class Source(Protocol):
    """All rows of a job's input; a row's position never changes, whatever is added later."""

    @property
    def schema(self) -> pa.Schema: ...
    @property
    def files(self) -> list[FileIdentity]: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def replaced_surrogates(self) -> int:
        """Lone surrogates replaced by U+FFFD so far."""
        ...

    @property
    def unfinished(self) -> Sequence[str]:
        """Places of lines that are still being written, and no rows yet."""
        ...

    @property
    def repeated(self) -> Sequence[int]:
        """Positions of rows that have the `input.id` of a row which came with an earlier run of the job."""
        ...

    def batches(self, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[RowBatch]:
        """Rows from position `start` on, ascending, with these columns only; about one row group in memory."""
        ...

    def place(self, position: int) -> str:
        """The file and the line or row of a position, for messages."""
        ...


class FileReader(Protocol):
    """One file: its rows from 0 to `num_rows`, in the types it holds."""

    @property
    def file(self) -> InputFile: ...
    @property
    def schema(self) -> pa.Schema: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def replaced_surrogates(self) -> int: ...

    def read(self, start: int, stop: int, schema: pa.Schema) -> Iterator[RowBatch]:
        """Rows start..stop-1 with the columns and types of `schema`; `RowBatch.start` counts from the file's row 0."""
        ...

    def place(self, row: int) -> str:
        """For example "line 3" or "row 2"."""
        ...


def bad_rows(reader: FileReader, start: int, problems: Mapping[int, str]) -> dict[int, RowError]:
    """Errors by offset of rows that do not fit, each naming the file and the place; row `start` has offset 0."""
    return {at: bad_row(f"{reader.file.name} {reader.place(start + at)}: {problems[at]}") for at in sorted(problems)}


def bad_row(message: str) -> RowError:
    """The error of a row that could not be read."""
    return RowError("bad_row", "read", message)
