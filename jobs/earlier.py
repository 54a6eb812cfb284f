"""What a step sees: the rows of the input with the answers of earlier steps beside them, at the input's positions.

Knows the final files of earlier steps and which rows they left out; journals and templates are not known here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchgen.pipeline.rows import FileIdentity, RowBatch, Source

from .columns import result_columns
from .finals import RowReader, read_results
from .outcomes import SKIPPED
from .output import Output

_PORTION = 4096  # rows read at once where no input is read


@dataclass(frozen=True)
class EarlierAnswers:
    """A `Source` over the rows of the input that all `earlier` steps have an outcome for, the first `num_rows`.

    Final files are looked at when rows are read, so the earlier steps may still be on their way before. Rows that one
    of them skipped have nulls.
    """

    source: Source
    earlier: Sequence[Output]
    num_rows: int

    @property
    def schema(self) -> pa.Schema:
        return with_answers(self.source.schema, *(result_columns(output.job) for output in self.earlier))

    @property
    def files(self) -> list[FileIdentity]:
        return self.source.files

    @property
    def replaced_surrogates(self) -> int:
        return self.source.replaced_surrogates

    @property
    def unfinished(self) -> Sequence[str]:
        """Nothing new: the first step has told."""
        return ()

    @property
    def repeated(self) -> Sequence[int]:
        """None beside those that the first step has left out."""
        return ()

    @property
    def skipped(self) -> NDArray[np.bool_]:
        """True for rows that an earlier step left out; over all rows that have been answered."""
        return np.asarray(self.earlier[-1].outcomes.codes == SKIPPED)

    @property
    def publications(self) -> list[str]:
        """What the answers are, as of now."""
        return [output.manifest.publication for output in self.earlier]

    def batches(self, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[RowBatch]:
        names = self.schema.names if columns is None else list(dict.fromkeys(columns))
        schema = pa.schema([self.schema.field(name) for name in names], self.schema.metadata)
        own = [name for name in names if name in self.source.schema.names]
        readers = self._readers(names, start)
        for batch in self.source.batches(start, own):
            if batch.start >= self.num_rows:
                return
            rows = batch.slice(0, self.num_rows - batch.start)
            yield RowBatch(rows.start, _beside(rows.columns, rows.num_rows, readers, schema), rows.errors)

    def answers(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Columns of earlier steps alone, over all rows that have been answered; the input is not read."""
        schema = pa.schema([self.schema.field(name) for name in columns])
        readers, total = self._readers(columns, 0), len(self.skipped)
        for start in range(0, total, _PORTION):
            yield _beside(None, min(_PORTION, total - start), readers, schema)

    def place(self, position: int) -> str:
        return self.source.place(position)

    def _readers(self, names: Sequence[str], start: int) -> "list[_Answers]":
        found = []
        for output in self.earlier:
            results = result_columns(output.job)
            wanted = pa.schema([results.field(name) for name in results.names if name in names])
            if wanted.names:
                found.append(_Answers(output, wanted, start))
        return found


class _Answers:
    """Result columns of one step by position, read once from front to back."""

    def __init__(self, output: Output, schema: pa.Schema, start: int) -> None:
        self.schema = schema
        self._skipped = np.array(output.manifest.skipped, np.int64)
        self._reader = RowReader(read_results(output.path, output.job.output, schema), schema)
        self._next = 0
        while self._next < start:
            self.take(min(_PORTION, start - self._next))

    def take(self, num_rows: int) -> pa.Table:
        """The next positions, those that were skipped as nulls."""
        first, self._next = self._next, self._next + num_rows
        low, high = np.searchsorted(self._skipped, (first, self._next))
        rows = self._reader.take(num_rows - int(high - low))
        if low == high:
            return rows
        kept = np.ones(num_rows, bool)
        kept[self._skipped[low:high] - first] = False
        index = np.cumsum(kept) - 1
        return rows.take(pa.array(index, mask=~kept))


def with_answers(schema: pa.Schema, *results: pa.Schema) -> pa.Schema:
    """The columns of rows with result columns behind them."""
    return pa.schema([*schema, *(field for columns in results for field in columns)], schema.metadata)


def _beside(
    rows: pa.RecordBatch | None, num_rows: int, readers: Sequence[_Answers], schema: pa.Schema
) -> pa.RecordBatch:
    """Columns of the input and of earlier steps in the order of `schema`."""
    arrays = {} if rows is None else dict(zip(rows.schema.names, rows.columns, strict=True))
    for reader in readers:
        table = reader.take(num_rows)
        arrays.update({name: table.column(name).combine_chunks() for name in table.schema.names})
    if not arrays and rows is not None:
        return rows
    return pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)
