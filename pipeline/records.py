"""Records of a delimited text file in blocks of bounded size, with the numbers of their lines.

Knows bytes, quotes and line feeds. A line on which a quoted field goes wrong is a record alone, so the next ones stay.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO

from .lines import FIRST_BLOCK, Block, Line, open_bytes, skip_to, without_mark
from .place import AnyPath

MAX_RECORD_BYTES = 64 << 20  # a quoted field that is not closed within so many bytes never is


@dataclass(frozen=True)
class Dialect:
    """How fields are set apart: by one byte, and by double quotes around those that hold it or a line feed."""

    delimiter: bytes

    @cached_property
    def record(self) -> re.Pattern[bytes]:
        """As many whole fields as there are, up to the end of the record or to where a quoted field goes wrong."""
        field = rb'(?:"[^"]*(?:""[^"]*)*"|(?!")[^%b\n]*)' % re.escape(self.delimiter)
        return re.compile(rb"%b(?:%b%b)*+\r?" % (field, re.escape(self.delimiter), field))

    @cached_property
    def field(self) -> re.Pattern[str]:
        """One field of a record and the delimiter before it: quoted content, or plain content."""
        delimiter = re.escape(self.delimiter.decode())
        return re.compile(rf'(?:^|{delimiter})(?:"([^"]*(?:""[^"]*)*)"|((?!")[^{delimiter}]*))')


_QUOTED = re.compile(rb'"[^"]*(?:""[^"]*)*"')


def read_records(
    path: AnyPath, dialect: Dialect, block_bytes: int, start: Block = FIRST_BLOCK
) -> Iterator[tuple[Block, list[Line]]]:
    """Blocks of about `block_bytes`, each with its records that are not blank; blocks without one are left out."""
    with open_bytes(path) as file:
        skip_to(file, start.offset)
        yield from _Splitter(file, dialect, block_bytes, start).blocks()


class _Splitter:
    def __init__(self, file: BinaryIO, dialect: Dialect, block_bytes: int, start: Block) -> None:
        self._file = file
        self._dialect = dialect
        self._block_bytes = block_bytes
        self._offset, self._number = start
        self._data = b""
        self._ended = False

    def blocks(self) -> Iterator[tuple[Block, list[Line]]]:
        self._fill()
        if self._offset == 0:
            rest = without_mark(self._data)
            self._offset, self._data = len(self._data) - len(rest), rest
        while self._data:
            block, records = Block(self._offset, self._number), list(self._records())
            if records:
                yield block, records
            if not self._ended:
                self._fill()

    def _fill(self) -> None:
        """Reads on: as much as is waiting already, so that a long record is looked at a few times only."""
        more = self._file.read(max(self._block_bytes, len(self._data)))
        self._ended = not more
        self._data += more

    def _records(self) -> Iterator[Line]:
        """The whole records of what was read, which then are taken off."""
        at = 0
        while at < len(self._data):
            end = self._end_of_record(at)
            if end is None:
                break
            text, after = self._data[at : end[0]], end[1]
            if text and not text.isspace():
                yield Line(self._number, text)
            self._number += self._data.count(b"\n", at, after)
            at = after
        self._offset += at
        self._data = self._data[at:]

    def _end_of_record(self, start: int) -> tuple[int, int] | None:
        """Where the record that begins at `start` ends, and where the next begins; None: more has to be read."""
        data = self._data
        match = self._dialect.record.match(data, start)
        end = match.end() if match else start
        if not self._at_end(end):
            if self._is_open(end) and not self._ended and len(data) - start < MAX_RECORD_BYTES:
                return None
            end = data.find(b"\n", start)
            if end < 0:
                return (len(data), len(data)) if self._ended else None
            return end, end + 1
        if end == len(data):
            return (end, end) if self._ended else None
        return end - (data[start:end].endswith(b"\r")), data.index(b"\n", end) + 1

    def _is_open(self, end: int) -> bool:
        """Whether whole fields stop at `end` because the next is quoted and its closing quote was not read yet."""
        quote = end + len(self._dialect.delimiter) if self._data.startswith(self._dialect.delimiter, end) else end
        return self._data.startswith(b'"', quote) and not _QUOTED.match(self._data, quote)

    def _at_end(self, end: int) -> bool:
        return self._data[end : end + 1] in (b"", b"\n")
