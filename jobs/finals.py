"""Reads the result columns back from final files, in the order of their rows.

Knows where each format keeps its files and rows; memory holds one batch.
"""

import json
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchgen.pipeline.config import OutputSettings
from batchgen.pipeline.openai_sink import ANSWERS, FAILURES, RESULTS
from batchgen.pipeline.place import AnyPath, matching, open_mapped, open_plain
from batchgen.pipeline.result import result_schema

from .journal import token_counts
from .outcomes import codes_of

_DATA = {
    "arrow": "data-*-of-*.arrow",
    "parquet": "data/train-*-of-*.parquet",
    "jsonl": "data.jsonl",
    "openai": ANSWERS,
}
_RESULTS = {**_DATA, "openai": RESULTS}
_BESIDE = ("dataset_info.json", "state.json", FAILURES, RESULTS)
_LINES = 5000


def first_file(form: str) -> str:
    """What the first data file of an output could be called."""
    return _DATA[form].replace("*", "00000", 1).replace("*", "00001")


def visible_files(directory: AnyPath) -> list[AnyPath]:
    """Every final file that a run may have put into an output directory, whatever its format."""
    data = [path for pattern in _DATA.values() for path in matching(directory, pattern)]
    return data + [directory / name for name in _BESIDE if (directory / name).exists()]


def read_results(directory: AnyPath, settings: OutputSettings, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The columns of `schema` (names with prefix) of all final files, row after row."""
    for path in matching(directory, _RESULTS[settings.format]):
        yield from _READERS[settings.format](path, schema)


def read_final_outcomes(directory: AnyPath, settings: OutputSettings, num_samples: int) -> NDArray[np.int8]:
    """The outcome code of every row of the final files."""
    many = num_samples > 1 or settings.format == "openai"
    kind = pa.list_(pa.string()) if many else pa.string()
    schema = pa.schema([(f"{settings.prefix}finish_reason", kind)])
    codes = [codes_of(batch.column(0)) for batch in read_results(directory, settings, schema)]
    return np.concatenate(codes) if codes else np.empty(0, np.int8)


def read_final_usage(directory: AnyPath, settings: OutputSettings) -> dict[str, NDArray[np.int64]]:
    """The token counts of every row of the final files."""
    name = f"{settings.prefix}usage"
    schema = pa.schema([result_schema(1, False, settings.prefix).field(name)])
    return token_counts(pa.Table.from_batches(read_results(directory, settings, schema), schema).column(name))


class RowReader:
    """Hands out rows of consecutive batches in portions of any size."""

    def __init__(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> None:
        self._batches = batches
        self._schema = schema
        self._rest: pa.Table = schema.empty_table()

    def take(self, num_rows: int) -> pa.Table:
        """The next rows; fewer at the end."""
        parts, found = [self._rest], self._rest.num_rows
        while found < num_rows and (batch := next(self._batches, None)) is not None:
            parts.append(pa.Table.from_batches([batch]))
            found += batch.num_rows
        table = pa.concat_tables(parts)
        self._rest = table.slice(num_rows)
        return table.slice(0, num_rows)


def _read_arrow(path: AnyPath, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with open_mapped(path) as file:
        names = pa.ipc.open_stream(file).schema.names
        file.seek(0)
        fields = [names.index(name) for name in schema.names]
        for batch in pa.ipc.open_stream(file, options=pa.ipc.IpcReadOptions(included_fields=fields)):
            yield batch.select(schema.names).cast(schema)


def _read_parquet(path: AnyPath, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with open_plain(path) as plain, pq.ParquetFile(plain) as file:
        for batch in file.iter_batches(columns=schema.names):
            yield batch.select(schema.names).cast(schema)


def _read_jsonl(path: AnyPath, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with path.open("rb") as file:
        while lines := list(islice(file, _LINES)):
            rows = [json.loads(line) for line in lines]
            yield pa.RecordBatch.from_pylist([{name: row.get(name) for name in schema.names} for row in rows], schema)


_READERS = {"arrow": _read_arrow, "parquet": _read_parquet, "jsonl": _read_jsonl, "openai": _read_arrow}
