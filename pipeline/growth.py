"""Positions that never shift while the input grows: known rows first, rows added since after them.

Knows file identities and row counts; reads at most a few kilobytes to tell growth from change.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .jsonl import JsonlReader
from .lines import is_compressed
from .place import AnyPath, version_of
from .rows import FileIdentity, FileReader, InputError

_EDGE_BYTES = 64 << 10
_CURE = "restore it, or start over with --fresh"


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of one file: row `first_row` of it stands at position `start`."""

    reader: FileReader
    identity: FileIdentity
    first_row: int
    start: int


def arrange(readers: Mapping[str, FileReader], known: Sequence[FileIdentity]) -> list[Run]:
    """Runs in order of position: the known ones as they were, then what files gained, then new files.

    Raises InputError (exit 2) when a known file is gone or its known rows are no longer the same.
    """
    for entry in {entry.path: entry for entry in known}.values():
        _check_known(entry, readers)
    identities = list(known)
    delivery = max((entry.delivery for entry in known), default=-1) + 1
    counted: dict[str, int] = {}
    for entry in known:
        counted[entry.path] = counted.get(entry.path, 0) + entry.rows
    for name in [*counted, *(name for name in readers if name not in counted)]:
        added = readers[name].num_rows - counted.get(name, 0)
        if added < 0:
            raise InputError(f"{name}: has fewer rows than when this job began; {_CURE}", 2)
        if added or name not in counted:
            identities.append(replace(_identity(readers[name], added), delivery=delivery))
    return _place(identities, readers)


def _place(identities: list[FileIdentity], readers: Mapping[str, FileReader]) -> list[Run]:
    runs: list[Run] = []
    next_row: dict[str, int] = {}
    start = 0
    for identity in identities:
        first_row = next_row.get(identity.path, 0)
        runs.append(Run(readers[identity.path], identity, first_row, start))
        next_row[identity.path] = first_row + identity.rows
        start += identity.rows
    return runs


def _check_known(entry: FileIdentity, readers: Mapping[str, FileReader]) -> None:
    if entry.path not in readers:
        raise InputError(f"{entry.path}: belongs to this job's input and is gone; {_CURE}", 2)
    path = readers[entry.path].file.path
    if not holds_rows(path, entry):
        raise InputError(f"{entry.path}: changed since this job began; {_CURE}", 2)


def holds_rows(path: AnyPath, entry: FileIdentity) -> bool:
    """Whether a file still has the rows it had: untouched, or grown by whole lines."""
    return _is_untouched(path, entry) or _has_grown(path, entry)


def _is_untouched(path: AnyPath, entry: FileIdentity) -> bool:
    status, version = path.stat(), version_of(path)
    if version or entry.version:
        return (status.st_size, version) == (entry.size, entry.version)
    return (status.st_size, status.st_mtime_ns) == (entry.size, entry.mtime_ns)


def _has_grown(path: AnyPath, entry: FileIdentity) -> bool:
    """Whether whole lines were appended and nothing else happened, judged by the bytes before the old end."""
    if not entry.edge or path.stat().st_size <= entry.size or _edge(path, entry.size) != entry.edge:
        return False
    with path.open("rb") as file:
        file.seek(max(entry.size - 1, 0))
        return b"\n" in file.read(2) or entry.size == 0


def _identity(reader: FileReader, rows: int) -> FileIdentity:
    """The file up to the end of its last row."""
    file, status = reader.file, reader.file.path.stat()
    end = reader.end if isinstance(reader, JsonlReader) else None
    size = status.st_size if end is None else end
    grows = file.format in ("jsonl", "openai") and not is_compressed(file.path)
    edge = _edge(file.path, size) if grows else ""
    return FileIdentity(file.name, size, status.st_mtime_ns, rows, edge, version_of(file.path))


def _edge(path: AnyPath, size: int) -> str:
    """Digest of the first and last bytes of a file's first `size` bytes."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(min(size, _EDGE_BYTES)))
        file.seek(max(size - _EDGE_BYTES, 0))
        digest.update(file.read(min(size, _EDGE_BYTES)))
    return digest.hexdigest()
