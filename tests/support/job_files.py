"""Job files and inputs for job tests, and what came out of them."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from batchgen.jobs import Job

BASE: dict[str, Any] = {
    "model": {"path": "fake/model"},
    "input": {"path": "rows.jsonl"},
    "prompt": {"text": "Say {{ word }}"},
    "generation": {"max_tokens": 12},
    "output": {"path": "out", "shard_rows": 7},
    "run": {"checkpoint_seconds": 0.01},
}


def write_job(folder: Path, **overrides: Any) -> Path:
    """A job file in `folder`; `overrides` are dotted keys with `__` for the dots."""
    document: dict[str, Any] = json.loads(json.dumps(BASE))
    for dotted, value in overrides.items():
        *sections, key = dotted.split("__")
        node = document
        for section in sections:
            node = node.setdefault(section, {})
        if value is None:
            node.pop(key, None)
        else:
            node[key] = value
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def make_job(folder: Path, **overrides: Any) -> Job:
    return Job.load(write_job(folder, **overrides))


def write_rows(folder: Path, count: int, start: int = 0, name: str = "rows.jsonl", mode: str = "w") -> Path:
    """Rows with a word, a nested column and a null word at every 11th place."""
    path = folder / name
    with path.open(mode, encoding="utf-8") as file:
        for at in range(start, start + count):
            word = None if at % 11 == 5 else f"word {at}"
            file.write(json.dumps({"word": word, "nested": {"list": [at, None], "name": "ä"}}) + "\n")
    return path


def read_output(output: Path, form: str = "arrow") -> list[dict[str, Any]]:
    """The rows of a finished output, as its users read them."""
    if form == "arrow":
        return list(datasets.load_from_disk(str(output)))
    if form == "parquet":
        files = sorted((output / "data").glob("train-*.parquet"))
        return [row for path in files for row in pq.read_table(path).to_pylist()]
    return [json.loads(line) for line in (output / "data.jsonl").read_text(encoding="utf-8").splitlines()]


def read_quickly(output: Path, form: str) -> list[dict[str, Any]]:
    """The same rows without the cost of opening a data set; FileNotFoundError when there is none."""
    if form != "arrow":
        return read_output(output, form)
    names = [entry["filename"] for entry in json.loads((output / "state.json").read_text())["_data_files"]]
    return [row for name in names for row in pa.ipc.open_stream((output / name).read_bytes()).read_all().to_pylist()]


def visible(output: Path) -> list[str]:
    """Names a reader of the directory sees."""
    found = (path for path in output.rglob("*") if path.is_file() and "__batchgen__" not in path.parts)
    return sorted(str(path.relative_to(output)) for path in found)


def manifest(output: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((output / "__batchgen__" / "manifest.json").read_text())
    return loaded
