"""Finds equal values in the column that identifies rows, with memory that does not grow with the rows.

A value twice in what came at once is a mistake; rows that come later and repeat one are old acquaintances.

Knows hashes in buckets on disk; equal hashes are confirmed by reading the values again.
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from .rows import InputError, Source

_NUM_BUCKETS = 64
_RECORD = np.dtype([("hash", "<u8"), ("position", "<i8")])


def repeated_rows(source: Source, column: str, delivery: Callable[[int], int]) -> list[int]:
    """Positions of the rows whose value a row of an earlier delivery has; nulls are not compared.

    `delivery(position)`: number of the run to which the row was new. Raises InputError (exit 2) naming the places of
    the first two equal values of one delivery.
    """
    with tempfile.TemporaryDirectory(prefix="batchgen-") as directory:
        paths = [Path(directory) / str(bucket) for bucket in range(_NUM_BUCKETS)]
        files = [path.open("wb") for path in paths]
        try:
            for records in _hashed(source, column):
                _spread(records, files)
        finally:
            for file in files:
                file.close()
        runs = [run for path in paths for run in _equal_hashes(path)]
    ordered = sorted(runs, key=lambda run: int(run[0]))
    return sorted(chain.from_iterable(_compare(source, column, run, delivery) for run in ordered))


def _compare(
    source: Source, column: str, positions: NDArray[np.int64], delivery: Callable[[int], int]
) -> Iterator[int]:
    """Reads the values whose hashes are equal, and tells those that come again from those that stand there twice."""
    seen: dict[str, int] = {}
    for position in positions.tolist():
        value = _value(source, column, position)
        earlier = seen.get(repr(value))
        if earlier is not None and delivery(earlier) == delivery(position):
            places = f"{source.place(earlier)}, {source.place(position)}"
            raise InputError(f"input.id: column {column!r} holds {value!r} twice: {places}", 2)
        if earlier is not None:
            yield position
        seen[repr(value)] = position


def _hashed(source: Source, column: str) -> Iterator[NDArray[Any]]:
    for batch in source.batches(columns=[column]):
        values = batch.columns.column(0).to_pylist()
        present = [(_hash(value), batch.start + offset) for offset, value in enumerate(values) if value is not None]
        yield np.array(present, _RECORD)


def _hash(value: Any) -> int:
    digest = hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _spread(records: NDArray[Any], files: Sequence[IO[bytes]]) -> None:
    buckets = records["hash"] % _NUM_BUCKETS
    for bucket in np.unique(buckets):
        files[int(bucket)].write(records[buckets == bucket].tobytes())


def _equal_hashes(path: Path) -> list[NDArray[np.int64]]:
    """Positions that share a hash, ascending, one array per hash that occurs again."""
    records = np.fromfile(path, _RECORD)
    records = records[np.lexsort((records["position"], records["hash"]))]
    changes = np.flatnonzero(records["hash"][1:] != records["hash"][:-1]) + 1
    edges = np.concatenate([[0], changes, [len(records)]])
    return [records["position"][edges[at] : edges[at + 1]] for at in np.flatnonzero(np.diff(edges) > 1)]


def _value(source: Source, column: str, position: int) -> Any:
    batch = next(iter(source.batches(position, [column])))
    return batch.columns.column(0)[0].as_py()
