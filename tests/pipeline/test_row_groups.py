"""How much of a file is in memory while its rows are rendered."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stand_ins import ByteTokenizer

from batchgen.engine.request import Sampling
from batchgen.pipeline.config import InputSettings, PromptSettings
from batchgen.pipeline.flow import _Flow, _render
from batchgen.pipeline.prompt import Renderer
from batchgen.pipeline.source import open_source

GROUP_ROWS, TEXT = 500, "x" * 2000


@pytest.mark.parametrize("num_files", [1, 3])
def test_one_row_group_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_files: int) -> None:
    """Whenever a row group is about to be read, what Arrow holds is less than one."""
    table = pa.table({"text": [TEXT] * (GROUP_ROWS * 6)})
    for number in range(num_files):
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=GROUP_ROWS, use_dictionary=False)
    del table
    source = open_source(InputSettings(path="*.parquet"), tmp_path)
    renderer = Renderer(PromptSettings(text="{{ text }}"), Sampling(), {}, ByteTokenizer(), 10_000, "2026-01-01")
    held: list[int] = []
    read = pq.ParquetFile.read_row_group

    def counted(*arguments: object, **options: object) -> pa.Table:
        held.append(pa.total_allocated_bytes() - before)
        return read(*arguments, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    before = pa.total_allocated_bytes()
    rows = sum(1 for _ in _render(source, renderer, lambda position: False, _Flow()))
    assert rows == len(held) * GROUP_ROWS == num_files * 6 * GROUP_ROWS
    assert max(held) < GROUP_ROWS * len(TEXT)
