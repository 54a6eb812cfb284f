"""Prompts as compact arrays, in memory and in a pair of files.

Knows tokens and the few numbers that lead from a prompt back to its request; their order is decided elsewhere.
"""

import errno
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROW = np.dtype([("key", "<i8"), ("seed", "<i8"), ("length", "<i4"), ("sampling", "<i4")])
TOKEN_BYTES = 4
_GATHERED_AT_ONCE = 1 << 18  # tokens


class StoreError(Exception):
    """The token store cannot be written: one line with the directory and the bytes needed."""

    exit_code = 1


@dataclass(frozen=True)
class TokenRows:
    """Prompts one after another: `tokens` uint32, and of each its key, seed, length and sampling number (`ROW`)."""

    tokens: NDArray[np.uint32]
    rows: NDArray[np.void]

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Prompt i is tokens[offsets[i]:offsets[i + 1]]."""
        return np.concatenate([[0], np.cumsum(self.rows["length"], dtype=np.int64)]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_bytes(self) -> int:
        return TOKEN_BYTES * len(self.tokens) + ROW.itemsize * len(self.rows)

    def prompt(self, index: int) -> NDArray[np.uint32]:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def take(self, order: NDArray[np.int64]) -> "TokenRows":
        """The rows of these indices, in this order."""
        rows = self.rows[order]
        starts, lengths = self.offsets[order], rows["length"].astype(np.int64)
        ends = np.cumsum(lengths)
        tokens = np.empty(int(ends[-1]) if len(ends) else 0, np.uint32)
        for first, last in _pieces(ends):
            begin = int(ends[first] - lengths[first])
            shift = starts[first:last] - (ends[first:last] - lengths[first:last])
            places = np.arange(begin, int(ends[last - 1])) + np.repeat(shift, lengths[first:last])
            np.take(self.tokens, places, out=tokens[begin : int(ends[last - 1])])
        return TokenRows(tokens, rows)


def _pieces(ends: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of rows that hold about as many tokens as are gathered at once."""
    first = 0
    while first < len(ends):
        taken = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, taken + _GATHERED_AT_ONCE, side="right")))
        yield first, last
        first = last


def concatenate(parts: Sequence[TokenRows]) -> TokenRows:
    """All rows of the parts, one part after another."""
    if len(parts) == 1:
        return parts[0]
    tokens = [np.zeros(0, np.uint32), *(part.tokens for part in parts)]
    return TokenRows(np.concatenate(tokens), np.concatenate([np.zeros(0, ROW), *(part.rows for part in parts)]))


@dataclass(frozen=True)
class RowFiles:
    """Rows on disk: `NAME.tokens` and `NAME.rows`."""

    directory: Path
    name: str

    @property
    def _paths(self) -> tuple[Path, Path]:
        return self.directory / f"{self.name}.tokens", self.directory / f"{self.name}.rows"

    def write(self, rows: TokenRows) -> None:
        """Raises StoreError when the disk is full."""
        for path, array in zip(self._paths, (rows.tokens, rows.rows), strict=True):
            with naming_space(self.directory, rows.num_bytes), path.open("wb") as file:
                file.write(array.data)

    def read(self, rows: slice, tokens: slice) -> TokenRows:
        """A range of rows and the range of tokens that are theirs."""
        tokens_path, rows_path = self._paths
        return TokenRows(_read(tokens_path, np.dtype(np.uint32), tokens), _read(rows_path, ROW, rows))

    def remove(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)


def _read(path: Path, kind: np.dtype[Any], part: slice) -> NDArray[Any]:
    return np.fromfile(path, kind, part.stop - part.start, offset=part.start * kind.itemsize)


@contextmanager
def naming_space(directory: Path, num_bytes: int) -> Iterator[None]:
    """Turns an error for want of disk space into one line with the directory and the bytes that were to be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(directory).free
        raise StoreError(
            f"{directory}: the disk is full: the token store needs {num_bytes} bytes more, {free} are free; "
            "finished rows are kept, free space and give the same command again"
        ) from error
