"""Keeps a step in line with the steps before it: rows are asked again when what they read has changed since.

Knows a digest per row of the answers that a step reads; what is asked and how is not known here.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchgen.pipeline.place import AnyPath, open_plain
from batchgen.pipeline.prompt import template_columns

from .earlier import EarlierAnswers
from .files import write_aside
from .job import Job
from .names import READ
from .outcomes import OPEN, SKIPPED
from .output import Output

_SKIPPED_DIGEST = 0
_PUBLICATIONS = b"publications"


@dataclass(frozen=True)
class Read:
    """What the outcomes of a step rest on: the earlier steps' final files, and a digest of each row's share of them."""

    publications: list[str] = field(default_factory=list)
    digests: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))

    @classmethod
    def load(cls, path: AnyPath) -> "Read":
        """As stored; nothing where no run has come so far."""
        if not path.exists():
            return cls()
        with open_plain(path) as file:
            table = pa.ipc.open_file(file).read_all()
        return cls(json.loads(table.schema.metadata[_PUBLICATIONS]), table.column(0).to_numpy())

    def save(self, path: AnyPath) -> None:
        schema = pa.schema([("digest", pa.uint64())], {_PUBLICATIONS: json.dumps(self.publications)})
        with write_aside(path) as file, pa.ipc.new_file(file, schema) as writer:
            writer.write_table(pa.Table.from_arrays([pa.array(self.digests)], schema=schema))


def follow(output: Output, source: EarlierAnswers) -> None:
    """Opens rows whose outcome rests on other answers than those of now, and leaves out what earlier steps left out.

    A kill in between does no harm: rows are open before the record says that they rest on the answers of now.
    """
    path, skipped = output.sidecar / READ, source.skipped
    stored = Read.load(path)
    current = stored
    if stored.publications != source.publications:
        current = Read(source.publications, digest_rows(source, answers_read(output.job, source)))
    known = min(len(stored.digests), len(current.digests))
    changed = np.zeros(len(skipped), bool)
    changed[:known] = stored.digests[:known] != current.digests[:known]
    codes = output.outcomes.codes[: len(skipped)]
    inside = np.arange(len(skipped)) < len(codes)
    changed[: len(codes)] &= codes != OPEN  # beyond them the journal may hold outcomes that this run does not know
    passed = skipped & inside
    passed[: len(codes)] &= codes != SKIPPED
    _note(output, changed & ~skipped, OPEN)
    _note(output, passed, SKIPPED)
    if current is not stored:
        current.save(path)


def _note(output: Output, rows: NDArray[np.bool_], code: int) -> None:
    positions = np.flatnonzero(rows)
    output.note(positions, np.full(len(positions), code, np.int8))


def answers_read(job: Job, source: EarlierAnswers) -> list[str]:
    """The columns of earlier steps that decide what a step asks."""
    used = template_columns(job.prompt) | frozenset(job.generation.per_row.values())
    return sorted(used - frozenset(source.source.schema.names))


def digest_rows(source: EarlierAnswers, columns: list[str]) -> NDArray[np.uint64]:
    """A 64-bit digest per row of its values in these columns; 0 where an earlier step left the row out."""
    skipped = source.skipped
    digests = np.ones(len(skipped), np.uint64)
    start = 0
    for batch in source.answers(columns) if columns else ():
        values = zip(*(column.to_pylist() for column in batch.columns), strict=True)
        digests[start : start + batch.num_rows] = list(map(_digest, values))
        start += batch.num_rows
    digests[skipped] = _SKIPPED_DIGEST
    return digests


def _digest(values: Iterable[object]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(errors="surrogatepass"), digest_size=8).digest())
