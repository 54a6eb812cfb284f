"""Which files a finished output becomes on the Hub, under names that `load_dataset` finds by configuration and split.

Knows the output's formats; Arrow becomes Parquet shard by shard, with images and sounds that lie elsewhere put inside.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.pipeline.openai_sink import ANSWERS, FAILURES
from batchgen.pipeline.sink import ParquetSink

from .manifest import Manifest

_SHARD = r"-\d{5}-of-\d{5}\.(parquet|jsonl)"


@dataclass(frozen=True)
class HubFile:
    """A file of the output and its path in the repository; `convert`: it is sent as Parquet."""

    path_in_repo: str
    source: Path
    convert: bool = False

    def stage(self, scratch: Path) -> Path:
        """The file as it is sent; a converted one is new in `scratch`."""
        if not self.convert:
            return self.source
        target = scratch / Path(self.path_in_repo).name
        with pa.memory_map(str(self.source)) as file:
            reader = pa.ipc.open_stream(file)
            ParquetSink(reader.schema).write(target, map(_with_contents, reader))
        return target


@dataclass(frozen=True)
class HubLayout:
    """Where a configuration and split of a data set lie in its repository."""

    config: str
    split: str

    @property
    def folder(self) -> str:
        return "data" if self.config == "default" else self.config

    @property
    def pattern(self) -> str:
        """The glob of the split's data files, as the card names it."""
        return f"{self.folder}/{self.split}-*"

    def shard(self, index: int, total: int, suffix: str) -> str:
        return f"{self.folder}/{self.split}-{index:05d}-of-{total:05d}{suffix}"

    @property
    def failures(self) -> str:
        """Beside the data files, and none of them."""
        return f"{self.folder}/errors-{self.split}.jsonl"

    def is_mine(self, path: str) -> bool:
        """Whether an earlier push of this configuration and split put the file there."""
        shard = re.fullmatch(re.escape(f"{self.folder}/{self.split}") + _SHARD, path)
        return shard is not None or path == self.failures


def hub_files(output: Path, manifest: Manifest, layout: HubLayout) -> list[HubFile]:
    """The files of a finished output, data files first and in the order of their rows."""
    form = manifest.layout["output"]["format"]
    shards = _shards(output, form)
    suffix = ".jsonl" if form in ("jsonl", "openai") else ".parquet"
    names = (layout.shard(index, len(shards), suffix) for index in range(len(shards)))
    files = [HubFile(name, path, form == "arrow") for name, path in zip(names, shards, strict=True)]
    return files + ([HubFile(layout.failures, output / FAILURES)] if form == "openai" else [])


def arrow_schema(file: HubFile) -> pa.Schema | None:
    """The columns of a data file; None where the format has no schema of its own."""
    if file.convert:
        with pa.memory_map(str(file.source)) as source:
            return pa.ipc.open_stream(source).schema
    return pq.read_schema(file.source) if file.source.suffix == ".parquet" else None


def _shards(output: Path, form: str) -> list[Path]:
    if form == "arrow":
        state = json.loads((output / "state.json").read_text(encoding="utf-8"))
        return [output / entry["filename"] for entry in state["_data_files"]]
    if form == "parquet":
        return sorted((output / "data").glob("train-*-of-*.parquet"))
    return [output / (ANSWERS if form == "openai" else "data.jsonl")]


def _with_contents(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with the bytes of files that its rows only point at: paths of this machine mean nothing elsewhere."""
    from datasets import Features
    from datasets.features.features import require_storage_embed
    from datasets.table import embed_table_storage

    features = Features.from_arrow_schema(batch.schema)
    if not any(require_storage_embed(feature) for feature in features.values()):
        return batch
    (whole,) = embed_table_storage(pa.Table.from_batches([batch])).combine_chunks().to_batches()
    return whole


def example_rows(files: list[HubFile], count: int) -> Iterator[dict[str, object]]:
    """The first rows of the data files."""
    for file in files:
        for row in _rows(file):
            if count == 0:
                return
            count -= 1
            yield row


def _rows(file: HubFile) -> Iterator[dict[str, object]]:
    if file.convert:
        with pa.memory_map(str(file.source)) as source:
            for batch in pa.ipc.open_stream(source):
                yield from (batch.slice(at, 1).to_pylist()[0] for at in range(batch.num_rows))
    elif file.source.suffix == ".parquet":
        with pq.ParquetFile(file.source) as parquet:
            for batch in parquet.iter_batches(batch_size=16):
                yield from batch.to_pylist()
    else:
        with file.source.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)
