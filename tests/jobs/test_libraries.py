"""A finished output opens with equal content in datasets, pyarrow, pandas, polars and DuckDB."""

import json
from pathlib import Path
from typing import Any

import datasets
import duckdb
import pandas
import polars
import pyarrow as pa
import pyarrow.dataset
import pyarrow.json
import pytest
from fake_models import FakeModels
from job_files import make_job

from batchgen.jobs import run

Rows = list[dict[str, Any]]
NAMES = ["id", "text", "score", "tags", "nested", "completion", "finish_reason", "usage", "error"]


def write_input(folder: Path) -> None:
    rows = [
        {"id": at, "text": None if at == 4 else f"é {at}\n", "score": at / 4, "tags": ["a", str(at)],
         "nested": {"key": at, "text": "ä"}}
        for at in range(20)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def arrow_readers(output: Path) -> dict[str, Rows]:
    """An Arrow output holds streams: datasets and pyarrow open them, the others what pyarrow opened."""
    files = sorted(output.glob("data-*.arrow"))
    table = pa.concat_tables(pa.ipc.open_stream(path.read_bytes()).read_all() for path in files)
    shards = [polars.read_ipc_stream(path) for path in files]
    return {
        "datasets": list(datasets.load_from_disk(str(output))),
        "pyarrow": table.to_pylist(),
        "pandas": from_pandas(table.to_pandas()),
        "polars": polars.concat(shards).to_dicts(),
        "duckdb": from_duckdb(duckdb.from_arrow(table)),
    }


def parquet_readers(output: Path) -> dict[str, Rows]:
    pattern = str(output / "data" / "*.parquet")
    files = sorted((output / "data").glob("*.parquet"))
    return {
        "datasets": list(load(output, "parquet", pattern)),
        "pyarrow": pa.dataset.dataset([str(path) for path in files]).to_table().to_pylist(),
        "pandas": from_pandas(pandas.concat([pandas.read_parquet(path) for path in files])),
        "polars": polars.read_parquet(pattern).to_dicts(),
        "duckdb": from_duckdb(duckdb.read_parquet(pattern)),
    }


def jsonl_readers(output: Path) -> dict[str, Rows]:
    path = output / "data.jsonl"
    return {
        "datasets": list(load(output, "json", str(path))),
        "pyarrow": pa.json.read_json(path).to_pylist(),
        "pandas": from_pandas(pandas.read_json(path, lines=True, dtype_backend="pyarrow")),
        "polars": polars.read_ndjson(path, infer_schema_length=None).to_dicts(),
        "duckdb": from_duckdb(duckdb.read_json(str(path), format="newline_delimited")),
    }


READERS = {"arrow": arrow_readers, "parquet": parquet_readers, "jsonl": jsonl_readers}


def load(output: Path, loader: str, files: str) -> Any:
    return datasets.load_dataset(loader, data_files=files, split="train", cache_dir=str(output.parent / "cache"))


def from_duckdb(relation: Any) -> Rows:
    return [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]


def from_pandas(frame: "pandas.DataFrame") -> Rows:
    return pa.Table.from_pandas(frame, preserve_index=False).to_pylist()


def plain(value: Any) -> Any:
    """Values as all libraries spell them: no missing value of their own, no fields that are null throughout."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if plain(item) is not None}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if value != value else value


@pytest.mark.parametrize("form", list(READERS))
def test_five_libraries_read_the_same_rows(tmp_path: Path, form: str) -> None:
    write_input(tmp_path)
    run(make_job(tmp_path, prompt__text="Say {{ text }}", output__format=form), models=FakeModels())
    found = {name: [plain(row) for row in rows] for name, rows in READERS[form](tmp_path / "out").items()}
    expected = found["pyarrow"]
    assert [row["id"] for row in expected] == list(range(20))
    assert expected[4]["error"]["code"] == "null_value"
    assert set().union(*expected) == set(NAMES)
    for name, rows in found.items():
        assert rows == expected, name


def test_loaders_that_do_not_know_the_layout_count_right_or_say_so(tmp_path: Path) -> None:
    write_input(tmp_path)
    run(make_job(tmp_path, prompt__text="Say {{ text }}"), models=FakeModels())
    output = tmp_path / "out"
    assert len(load(output, "arrow", str(output / "*.arrow"))) == 20
    with pytest.raises(ValueError, match="use `load_from_disk` instead"):
        datasets.load_dataset(str(output), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(pa.ArrowInvalid, match="data-00000-of-00003"):
        pa.dataset.dataset([str(path) for path in sorted(output.glob("*.arrow"))], format="ipc")
