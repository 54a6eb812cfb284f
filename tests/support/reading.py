"""Short ways to open an input and to look at all of its rows."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.pipeline.config import InputSettings
from batchgen.pipeline.rows import Source
from batchgen.pipeline.source import open_source


def source_of(base: Path, path: Any, **more: Any) -> Source:
    return open_source(InputSettings.model_validate({"path": path, **more}), base)


def rows_of(source: Source, start: int = 0, columns: list[str] | None = None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch in source.batches(start, columns):
        assert batch.start == start + len(rows)
        rows += batch.columns.to_pylist()
    return rows


def errors_of(source: Source, columns: list[str] | None = None) -> dict[int, str]:
    return {
        batch.start + offset: error.message
        for batch in source.batches(columns=columns)
        for offset, error in batch.errors.items()
        if error.code == "bad_row"
    }


def write_parquet(path: Path, values: dict[str, Any], row_group_size: int = 10) -> None:
    pq.write_table(pa.table(values), path, row_group_size=row_group_size)
