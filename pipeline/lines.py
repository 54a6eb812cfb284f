"""Lines of a file in blocks of bounded size, with their numbers.

Knows bytes and line feeds only: a byte-order mark is dropped, a line may be longer than a block. Offsets of a
compressed file count the bytes that are in it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple, cast

import pyarrow as pa

from .place import AnyPath

_MARK = b"\xef\xbb\xbf"
_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_SKIP_BYTES = 1 << 20


class Line(NamedTuple):
    """A line that is not blank, without its end; `number` counts all lines of the file from 1.

    `ended`: a line feed follows; only the last line of a file may lack one.
    """

    number: int
    data: bytes
    ended: bool = True


class Block(NamedTuple):
    """Where a block of whole lines begins: its byte offset and the number of its first line."""

    offset: int
    line: int


FIRST_BLOCK = Block(0, 1)


def read_blocks(path: AnyPath, block_bytes: int, start: Block = FIRST_BLOCK) -> Iterator[tuple[Block, list[Line]]]:
    """Blocks of about `block_bytes`, each with its lines that are not blank; blocks without one are left out."""
    with open_bytes(path) as file:
        skip_to(file, start.offset)
        offset, number = start
        for data in _whole_lines(file, block_bytes):
            texts = data.split(b"\n")
            ended = not texts[-1]
            if ended:
                texts.pop()
            if offset == 0:
                texts[0] = without_mark(texts[0])
            lines = [Line(number + index, text) for index, text in enumerate(texts) if text and not text.isspace()]
            if lines and not ended and lines[-1].number == number + len(texts) - 1:
                lines[-1] = lines[-1]._replace(ended=False)
            if lines:
                yield Block(offset, number), lines
            offset += len(data)
            number += len(texts)


def offset_of(path: AnyPath, line: Line, block: Block) -> int:
    """The byte at which a line of a block begins."""
    with open_bytes(path) as file:
        skip_to(file, block.offset)
        for _ in range(line.number - block.line):
            file.readline()
        return file.tell()


def is_compressed(path: AnyPath) -> bool:
    """Whether the name says so."""
    return path.suffix.lower() in _CODECS


@contextmanager
def open_bytes(path: AnyPath) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed if its name says that it is compressed."""
    with path.open("rb") as file:
        codec = _CODECS.get(path.suffix.lower())
        stream = file if codec is None else pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)
        yield cast(BinaryIO, stream)


def skip_to(file: BinaryIO, offset: int) -> None:
    """Goes to a byte of a file that was just opened."""
    if isinstance(file, pa.CompressedInputStream):
        while offset > 0 and (data := file.read(min(offset, _SKIP_BYTES))):
            offset -= len(data)
    else:
        file.seek(offset)


def without_mark(data: bytes) -> bytes:
    """The bytes without a byte-order mark in front."""
    return data[len(_MARK) :] if data.startswith(_MARK) else data


def _whole_lines(file: BinaryIO, block_bytes: int) -> Iterator[bytes]:
    """The rest of the file cut after line feeds; a piece is longer than a block only if one line is."""
    pieces: list[bytes] = []
    while data := file.read(block_bytes):
        cut = data.rfind(b"\n") + 1
        if cut:
            yield b"".join([*pieces, data[:cut]])
            pieces = []
            data = data[cut:]
        if data:
            pieces.append(data)
    if pieces:
        yield b"".join(pieces)
