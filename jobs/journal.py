"""The append-only journal of finished rows: segment files that appear by rename, cut by output shard inside.

Knows positions, outcome codes and opaque result columns. A segment that is not as it was written is left out and named.
"""

import re
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from .files import ASIDE, write_aside

POSITION, OUTCOME = "position", "outcome"
_USAGE = ("prompt_tokens", "cached_tokens", "completion_tokens")
_NAME = re.compile(r"(\d{6,})-([0-9a-f]{8})\.arrow")
_MAX_BATCH_ROWS = 10_000

Recovered = tuple[NDArray[np.int64], NDArray[np.int8]]


@dataclass(frozen=True)
class Piece:
    """One record batch of a segment: rows of a single output shard."""

    path: Path
    batch: int


@dataclass
class Journal:
    """Where the finished rows of each shard lie, in the order they were written."""

    directory: Path
    shard_rows: int
    pieces: dict[int, list[Piece]] = field(default_factory=dict)
    broken: list[Path] = field(default_factory=list)
    _number: int = 0

    def recover(self, verify: bool = True) -> Iterator[Recovered]:
        """Positions and outcome codes of everything journaled, oldest first; finds `pieces` and `broken` anew.

        `verify` reads every byte to compare checksums; without it only files that cannot be opened count as broken.
        """
        self.pieces, self.broken = {}, []
        for path in self._segments():
            if verify and not _is_whole(path):
                self.broken.append(path)
                continue
            try:
                yield from self._index(path)
            except pa.ArrowInvalid:
                self.broken.append(path)

    def append(self, rows: pa.Table) -> None:
        """Writes one segment, on disk on return. `rows`: position int64, outcome int8, then the result columns."""
        batches = list(self._by_shard(rows))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, rows.schema) as writer:
            for _, batch in batches:
                writer.write_batch(batch)
        data = memoryview(sink.getvalue())
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{self._number + 1:06d}-{zlib.crc32(data):08x}.arrow"
        with write_aside(path) as file:
            file.write(data)
        self._number += 1
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
        old = {piece.path for pieces in self.pieces.values() for piece in pieces} | set(self.broken)
        self.pieces, self.broken = {}, []
        if any(batch.num_rows for batch in beyond):
            self.append(pa.Table.from_batches(beyond))
            for path in old:
                path.unlink()
        else:
            self.clear()

    def usage(self, column: str) -> dict[str, int]:
        """Token counts over everything journaled, rows that were asked again included."""
        totals: dict[str, int] = {}
        for pieces in self.pieces.values():
            for piece in pieces:
                usage = _read_batch(piece, column).column(column)
                for name in _USAGE:
                    totals[name] = totals.get(name, 0) + (pc.sum(pc.struct_field(usage, name)).as_py() or 0)
        return totals

    def clear(self) -> None:
        """Removes everything, broken segments included."""
        if self.directory.exists():
            shutil.rmtree(self.directory)
        self.pieces, self.broken = {}, []

    def _segments(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        found = []
        for path in self.directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match:
                found.append((int(match[1]), path))
                self._number = max(self._number, int(match[1]))
            elif not path.name.endswith(ASIDE):
                self.broken.append(path)
        return [path for _, path in sorted(found)]

    def _index(self, path: Path) -> Iterator[Recovered]:
        options = pa.ipc.IpcReadOptions(included_fields=[0, 1])
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file, options=options)
            for index in range(reader.num_record_batches):
                batch = reader.get_batch(index)
                positions = batch.column(0).to_numpy().copy()
                self.pieces.setdefault(int(positions[0]) // self.shard_rows, []).append(Piece(path, index))
                yield positions, batch.column(1).to_numpy().copy()

    def _by_shard(self, rows: pa.Table) -> Iterator[tuple[int, pa.RecordBatch]]:
        shards = rows.column(POSITION).to_numpy() // self.shard_rows
        order = np.argsort(shards, kind="stable")
        sorted_rows, sorted_shards = rows.take(pa.array(order)), shards[order]
        edges = np.flatnonzero(np.diff(sorted_shards, prepend=-1, append=-1))
        for start, stop in pairwise(edges):
            piece = sorted_rows.slice(start, stop - start).combine_chunks()
            for batch in piece.to_batches(max_chunksize=_MAX_BATCH_ROWS):
                yield int(sorted_shards[start]), batch


def _is_whole(path: Path) -> bool:
    """Whether a segment holds the bytes its name vouches for."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    match = _NAME.fullmatch(path.name)
    return match is not None and int(match[2], 16) == checksum


def _read_batch(piece: Piece, column: str | None = None) -> pa.RecordBatch:
    """A whole batch in memory, or one column of it without touching the others."""
    if column is None:
        with pa.OSFile(str(piece.path)) as file:
            return pa.ipc.open_file(file).get_batch(piece.batch)
    with pa.memory_map(str(piece.path)) as file:
        at = pa.ipc.open_file(file).schema.get_field_index(column)
        return pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=[at])).get_batch(piece.batch)
