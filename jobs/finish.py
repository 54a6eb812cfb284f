"""Makes the final files: shard by shard, results in input order beside the input columns carried along.

Knows which rows belong into which shard and that each must be there exactly once; the formats are the sink's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchgen.engine.request import RowError
from batchgen.pipeline.result import failed_rows
from batchgen.pipeline.rows import RowBatch, Source

from .errors import JobError
from .finals import RowReader
from .journal import OUTCOME, POSITION, USAGE, Journal, token_counts
from .outcomes import ERROR, LENGTH, OPEN, SKIPPED, STOP, Outcomes

_PORTION = 4096  # rows joined at once


@dataclass
class ShardMaker:
    """The rows of each final shard, joined from the journal, the earlier final files and the input."""

    source: Source
    columns: list[str]
    outcomes: Outcomes
    journal: Journal
    earlier: RowReader
    standing: NDArray[np.int8]  # outcomes of the rows in the earlier final files, OPEN elsewhere
    result_schema: pa.Schema
    usage_name: str
    with_position: bool = False
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(USAGE, 0))

    @property
    def schema(self) -> pa.Schema:
        """The position if it is wanted, carried columns, then result columns; the input's metadata stays."""
        position = [pa.field(POSITION, pa.int64())] if self.with_position else []
        carried = [self.source.schema.field(name) for name in self.columns]
        return pa.schema([*position, *carried, *self.result_schema], self.source.schema.metadata)

    def shards(self) -> Iterator[Iterator[pa.RecordBatch]]:
        """The batches of one shard after another; each must be used up before the next."""
        if (missing := self.outcomes.positions(OPEN)).size:
            raise JobError(f"{missing.size} rows have no outcome, the first is {self.source.place(int(missing[0]))}")
        carried = _Carried(self.source, self.columns)
        for shard in range(max(1, -(-len(self.outcomes.codes) // self.journal.shard_rows))):
            yield self._join(shard, carried)

    def _join(self, shard: int, carried: "_Carried") -> Iterator[pa.RecordBatch]:
        start = shard * self.journal.shard_rows
        stop = min(start + self.journal.shard_rows, len(self.outcomes.codes))
        results = self._results(shard, start, stop)
        kept = self.outcomes.codes[start:stop] != SKIPPED
        done = 0
        for first, batch, errors in carried.between(start, stop):
            mask = kept[first - start : first - start + batch.num_rows]
            rows = batch.filter(pa.array(mask))
            if rows.num_rows:
                answers = results.portion(done, rows.num_rows)
                answers = self._without_unreadable(answers, first + np.flatnonzero(mask), errors)
                self._count(answers)
                head = [pa.array(first + np.flatnonzero(mask))] if self.with_position else []
                yield pa.RecordBatch.from_arrays([*head, *rows.columns, *answers.columns], schema=self.schema)
            done += rows.num_rows

    def _without_unreadable(
        self, answers: pa.RecordBatch, positions: NDArray[np.int64], errors: dict[int, RowError]
    ) -> pa.RecordBatch:
        """Rows whose carried columns cannot be read get that as their outcome: no answer stands beside made-up nulls.

        Damage in a column that no prompt uses shows only here. An answer that was published is never given up for it.
        """
        places = [place for place, position in enumerate(positions) if int(position) in errors]
        if not places:
            return answers
        self._require_unpublished(positions[places], errors)
        self.outcomes.record(positions[places], np.full(len(places), ERROR, np.int8))
        failed = failed_rows([errors[int(positions[place])] for place in places], self.result_schema)
        index = np.arange(answers.num_rows)
        index[places] = answers.num_rows + np.arange(len(places))
        return pa.concat_batches([answers, failed]).take(pa.array(index))

    def _require_unpublished(self, positions: NDArray[np.int64], errors: dict[int, RowError]) -> None:
        answered = positions[np.isin(self.standing[positions], (STOP, LENGTH))]
        if answered.size:
            raise JobError(
                f"{errors[int(answered[0])].message}; its answer is published already, and nothing was changed: "
                "restore the input, or start over with --fresh"
            )

    def _results(self, shard: int, start: int, stop: int) -> "_Chosen":
        """Result rows of a shard by position; a later outcome of a row replaces an earlier one."""
        batches = [*self._earlier(start, stop), *self.journal.rows_of(shard)]
        positions = _joined([batch.column(POSITION).to_numpy() for batch in batches], np.int64)
        codes = _joined([batch.column(OUTCOME).to_numpy() for batch in batches], np.int8)
        _, last = np.unique(positions[::-1], return_index=True)
        index = len(positions) - 1 - last
        index = index[(codes[index] != SKIPPED) & (positions[index] < stop)]
        expected = start + np.flatnonzero(self.outcomes.codes[start:stop] != SKIPPED)
        if not np.array_equal(positions[index], expected):
            raise JobError(
                f"shard {shard}: {len(index)} rows are there, {len(expected)} must be; nothing was published"
            )
        return _Chosen([batch.select(self.result_schema.names) for batch in batches], index, self.result_schema)

    def _earlier(self, start: int, stop: int) -> list[pa.RecordBatch]:
        """Rows of the shard that the earlier final files hold, in the journal's form."""
        codes = self.standing[start:stop]
        positions = start + np.flatnonzero((codes != OPEN) & (codes != SKIPPED))
        batches, done = [], 0
        for batch in self.earlier.take(len(positions)).to_batches():
            head = [pa.array(positions[done : done + batch.num_rows]), pa.array(np.zeros(batch.num_rows, np.int8))]
            batches.append(
                pa.RecordBatch.from_arrays([*head, *batch.columns], schema=journal_schema(self.result_schema))
            )
            done += batch.num_rows
        return batches

    def _count(self, answers: pa.RecordBatch) -> None:
        for name, counts in token_counts(answers.column(self.usage_name)).items():
            self.tokens[name] += int(counts.sum())


def journal_schema(result_schema: pa.Schema) -> pa.Schema:
    """Position and outcome before the result columns."""
    return pa.schema([(POSITION, pa.int64()), (OUTCOME, pa.int8()), *result_schema])


class _Carried:
    """Input columns by position, read once from front to back."""

    def __init__(self, source: Source, columns: list[str]) -> None:
        self._batches = source.batches(0, columns)
        self._waiting: RowBatch | None = None

    def between(self, start: int, stop: int) -> Iterator[tuple[int, pa.RecordBatch, dict[int, RowError]]]:
        """(first position, rows, what was wrong by position) covering start..stop-1."""
        while start < stop:
            batch = self._waiting or next(self._batches)
            rows = batch.columns.slice(start - batch.start, min(stop - start, _PORTION))
            yield start, rows, {batch.start + offset: error for offset, error in batch.errors.items()}
            start += rows.num_rows
            self._waiting = batch if start < batch.start + batch.columns.num_rows else None


class _Chosen:
    """Rows picked from many batches, handed out in small portions, so that no array grows beyond its offsets."""

    def __init__(self, batches: list[pa.RecordBatch], index: NDArray[np.int64], schema: pa.Schema) -> None:
        self._batches = batches
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
        self._index = index
        self._schema = schema

    def portion(self, start: int, num_rows: int) -> pa.RecordBatch:
        index = self._index[start : start + num_rows]
        batch_of = np.searchsorted(self._starts, index, side="right") - 1
        order = np.argsort(batch_of, kind="stable")
        parts = [
            self._batches[at].take(pa.array(index[batch_of == at] - self._starts[at])) for at in np.unique(batch_of)
        ]
        gathered = pa.concat_batches(parts) if parts else pa.RecordBatch.from_pylist([], self._schema)
        return gathered.take(pa.array(np.argsort(order, kind="stable")))


def _joined(arrays: list[NDArray[Any]], kind: type[Any]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, kind)
