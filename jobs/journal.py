"""The append-only journal of finished rows: segment files that appear by rename, cut by output shard inside.

Knows positions, outcome codes and opaque result columns. A segment that is not as it was written is left out and named.
"""

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchgen.pipeline.place import AnyPath, open_mapped, open_plain
from batchgen.pipeline.storage import ASIDE, remove_tree

from .files import write_aside

POSITION, OUTCOME = "position", "outcome"
USAGE = ("prompt_tokens", "cached_tokens", "completion_tokens")
_NAME = re.compile(r"(\d{6,})-([0-9a-f]{8})\.arrow")
_MAX_BATCH_ROWS = 10_000

Recovered = tuple[NDArray[np.int64], NDArray[np.int8]]


@dataclass(frozen=True)
class Piece:
    """One record batch of a segment: rows of a single output shard, of which those before `first` no longer count."""

    path: AnyPath
    batch: int
    first: int = 0


@dataclass
class Journal:
    """Where the finished rows of each shard lie, in the order they were written.

    Of segments up to number `published_segment`, rows below `published_rows` stand in final files and count no more.
    `permit` is called before anything is written, and may raise.
    """

    directory: AnyPath
    shard_rows: int
    pieces: dict[int, list[Piece]] = field(default_factory=dict)
    broken: list[AnyPath] = field(default_factory=list)
    published_segment: int = 0
    published_rows: int = 0
    permit: Callable[[], None] = lambda: None
    has_grown: bool = False
    last_segment: int = 0

    def recover(self, verify: bool = True) -> Iterator[Recovered]:
        """Positions and outcome codes of everything journaled, oldest first; finds `pieces` and `broken` anew.

        `verify` reads every byte to compare checksums; without it only files that cannot be opened count as broken.
        """
        self.pieces, self.broken, self.has_grown = {}, [], False
        self.last_segment = self.published_segment
        for number, path in self._segments():
            if verify and not _is_whole(path):
                self.broken.append(path)
                continue
            try:
                yield from self._index(path, self.published_rows if number <= self.published_segment else 0)
            except pa.ArrowInvalid:
                self.broken.append(path)

    def append(self, rows: pa.Table) -> None:
        """Writes one segment, on disk on return. `rows`: position int64, outcome int8, then the result columns."""
        self.permit()
        batches = list(self._by_shard(rows))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, rows.schema) as writer:
            for _, batch in batches:
                writer.write_batch(batch)
        data = memoryview(sink.getvalue())
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{self.last_segment + 1:06d}-{zlib.crc32(data):08x}.arrow"
        with write_aside(path) as file:
            file.write(data)
        self.last_segment += 1
        self.has_grown = True
        for index, (shard, _) in enumerate(batches):
            self.pieces.setdefault(shard, []).append(Piece(path, index))

    def rows_of(self, shard: int) -> list[pa.RecordBatch]:
        """The journaled rows of a shard, oldest first."""
        return [_read_batch(piece) for piece in self.pieces.get(shard, [])]

    def forget_rows_below(self, num_rows: int) -> None:
        """Drops rows that stand in final files; rows beyond them, if any, go to a segment of their own first."""
        beyond = [
            batch.filter(pc.field(POSITION) >= num_rows)
            for shard in self.pieces
            if (shard + 1) * self.shard_rows > num_rows
            for batch in self.rows_of(shard)
        ]
        old = [*(path for _, path in self._segments()), *self.broken]
        self.pieces, self.broken = {}, []
        if any(batch.num_rows for batch in beyond):
            self.append(pa.Table.from_batches(beyond))
            for path in old:
                path.unlink(missing_ok=True)
        else:
            self.clear()

    def usage(self, column: str) -> tuple[NDArray[np.int64], dict[str, NDArray[np.int64]]]:
        """Positions of everything journaled, each once, and the token counts of the last outcome of each."""
        batches = [_read_batch(piece, column) for pieces in self.pieces.values() for piece in pieces]
        if not batches:
            return np.empty(0, np.int64), {name: np.empty(0, np.int64) for name in USAGE}
        table = pa.Table.from_batches(batches)
        positions, last = np.unique(table.column(0).to_numpy()[::-1], return_index=True)
        return positions, {name: column[::-1][last] for name, column in token_counts(table.column(1)).items()}

    def clear(self) -> None:
        """Removes everything, broken segments included."""
        remove_tree(self.directory)
        self.pieces, self.broken = {}, []

    def _segments(self) -> list[tuple[int, AnyPath]]:
        if not self.directory.is_dir():
            return []
        found = []
        for path in self.directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match:
                found.append((int(match[1]), path))
                self.last_segment = max(self.last_segment, int(match[1]))
            elif not path.name.endswith(ASIDE):
                self.broken.append(path)
        return sorted(found)

    def _index(self, path: AnyPath, first: int) -> Iterator[Recovered]:
        """The rows of a segment from position `first` on."""
        options = pa.ipc.IpcReadOptions(included_fields=[0, 1])
        with open_mapped(path) as file:
            reader = pa.ipc.open_file(file, options=options)
            for index in range(reader.num_record_batches):
                batch = reader.get_batch(index)
                positions = batch.column(0).to_numpy()
                counts = positions >= first
                if counts.any():
                    self.pieces.setdefault(int(positions[0]) // self.shard_rows, []).append(Piece(path, index, first))
                    yield positions[counts], batch.column(1).to_numpy()[counts]

    def _by_shard(self, rows: pa.Table) -> Iterator[tuple[int, pa.RecordBatch]]:
        shards = rows.column(POSITION).to_numpy() // self.shard_rows
        order = np.argsort(shards, kind="stable")
        sorted_rows, sorted_shards = rows.take(pa.array(order)), shards[order]
        edges = np.flatnonzero(np.diff(sorted_shards, prepend=-1, append=-1))
        for start, stop in pairwise(edges):
            piece = sorted_rows.slice(start, stop - start).combine_chunks()
            for batch in piece.to_batches(max_chunksize=_MAX_BATCH_ROWS):
                yield int(sorted_shards[start]), batch


def _is_whole(path: AnyPath) -> bool:
    """Whether a segment holds the bytes its name vouches for."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    match = _NAME.fullmatch(path.name)
    return match is not None and int(match[2], 16) == checksum


def _read_batch(piece: Piece, column: str | None = None) -> pa.RecordBatch:
    """The rows of a piece that count in memory: all columns, or position and one other without touching the rest."""
    if column is None:
        with open_plain(piece.path) as file:
            batch = pa.ipc.open_file(file).get_batch(piece.batch)
    else:
        with open_mapped(piece.path) as file:
            fields = [0, pa.ipc.open_file(file).schema.get_field_index(column)]
            options = pa.ipc.IpcReadOptions(included_fields=fields)
            batch = pa.ipc.open_file(file, options=options).get_batch(piece.batch)
    return batch.filter(pc.field(POSITION) >= piece.first) if piece.first else batch


def token_counts(usage: pa.Array | pa.ChunkedArray) -> dict[str, NDArray[np.int64]]:
    """The fields of a `usage` column, zero where a row has none."""
    counts = {name: pc.fill_null(pc.struct_field(usage, name), 0).cast(pa.int64()) for name in USAGE}
    return {name: np.asarray(column.to_numpy()) for name, column in counts.items()}
